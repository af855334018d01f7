"""A prepared copy is made once, is the model in Hugging Face format, and survives whatever happens to its maker."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_files import IM_END, hf_state, write_tiny_gguf

from kvist.errors import KvistError, ModelFileError
from kvist.loading import gguf_conversion, load, prepared, quantised_weights
from kvist.loading.prepared import loaded_copy, prepared_copies, prepared_copy
from kvist.loading.progress import no_progress

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return write_tiny_gguf(tmp_path / "tiny.gguf", "llama", tensor_type="Q8_0")


def leftovers(cache: Path) -> list[str]:
    return [path.name for path in (cache / "prepared").iterdir() if path.name.endswith(".partial")]


@pytest.mark.parametrize(("weights_format", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_the_copy_holds_the_model_in_hugging_face_format(
    weights_format: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    state = hf_state("llama", tied=False)
    copy = prepared_copy(write_tiny_gguf(tmp_path / "tiny.gguf", "llama", state), weights_format, no_progress)
    found = load_file(copy / "model.safetensors")
    assert found.keys() == state.keys()
    dtypes = {name: dtype if tensor.dim() == 2 else torch.float32 for name, tensor in state.items()}
    assert all(found[name].dtype == dtypes[name] for name in state)
    assert all(torch.equal(found[name], state[name].to(dtypes[name])) for name in state)
    config = json.loads((copy / "config.json").read_text())
    assert (config["model_type"], config["dtype"]) == ("llama", str(dtype).removeprefix("torch."))
    assert json.loads((copy / "generation_config.json").read_text())["eos_token_id"] == [257, IM_END]
    assert (copy / "tokenizer.json").is_file()


def test_transformers_loads_the_copy_and_gives_the_weights(gguf: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    copy = prepared_copy(gguf, "fp32", no_progress)
    model = AutoModelForCausalLM.from_pretrained(copy, dtype=torch.float32)
    stored = load_file(copy / "model.safetensors")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, stored[name])
    assert AutoTokenizer.from_pretrained(copy)("ab cd")["input_ids"]


def test_it_is_made_once_per_content_and_format(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepared_copy(gguf, "bf16", no_progress)
    assert prepared_copy(gguf, "fp32", no_progress) != first
    renamed = tmp_path / "other name.gguf"
    renamed.write_bytes(gguf.read_bytes())
    monkeypatch.setattr(gguf_conversion, "convert_gguf", None)
    assert prepared_copy(renamed, "bf16", no_progress) == first
    other = write_tiny_gguf(tmp_path / "other.gguf", "llama", hf_state("llama", seed=1))
    with pytest.raises(TypeError):  # the maker that is no longer there would have been called
        prepared_copy(other, "bf16", no_progress)


def test_a_copy_that_is_there_needs_no_folder_that_can_be_written(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = prepared_copy(gguf, "bf16", no_progress)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert prepared_copy(gguf, "bf16", no_progress) == copy
    with pytest.raises(KvistError, match="set KVIST_CACHE"):
        prepared_copy(gguf, "fp32", no_progress)


def test_copies_are_listed_with_what_they_were_made_from(gguf: Path) -> None:
    assert prepared_copies() == []
    path = prepared_copy(gguf, "bf16", no_progress)
    (listed,) = prepared_copies()
    assert (listed.path, listed.source, listed.weights_format) == (path, "tiny.gguf", "bf16")
    assert listed.num_bytes == sum(file.stat().st_size for file in path.iterdir())


def test_listing_the_copies_writes_nothing(gguf: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert prepared_copies() == []
    assert not own_cache.exists()
    copy = prepared_copy(gguf, "bf16", no_progress)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", refuse)
    monkeypatch.setattr(Path, "touch", refuse)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert [listed.path for listed in prepared_copies()] == [copy]


def test_a_file_of_another_kind_is_refused_before_it_is_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "large.gguf"
    with path.open("wb") as file:
        file.write(b"PK\x03\x04")
        file.truncate(100 << 30)
    monkeypatch.setattr(prepared, "file_hash", None)
    with pytest.raises(ModelFileError, match="is not a GGUF file: it is a ZIP archive"):
        prepared_copy(path, "bf16", no_progress)


def test_progress_counts_the_bytes_of_the_weights(gguf: Path) -> None:
    seen: list[tuple[str, int, int | None]] = []
    copy = prepared_copy(gguf, "bf16", lambda *report: seen.append(report))
    preparing = [(done, total) for stage, done, total in seen if stage == "preparing tiny.gguf"]
    size = sum(tensor.nbytes for tensor in load_file(copy / "model.safetensors").values())
    assert preparing[0] == (0, size)
    assert preparing[-1] == (size, size)


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json", "prepared.json"])
@pytest.mark.parametrize("damage", ["cut", "removed", "emptied"])
def test_a_damaged_copy_is_made_again(name: str, damage: str, gguf: Path, own_cache: Path) -> None:
    copy = prepared_copy(gguf, "bf16", no_progress)
    whole = {file.name: file.read_bytes() for file in copy.iterdir()}
    match damage:
        case "cut":
            os.truncate(copy / name, len(whole[name]) - 20)
        case "removed":
            (copy / name).unlink()
        case "emptied":
            (copy / name).write_bytes(b"")
    assert prepared_copies() == []
    assert prepared_copy(gguf, "bf16", no_progress) == copy
    assert {file.name: file.read_bytes() for file in copy.iterdir()} == whole
    assert leftovers(own_cache) == []


@pytest.mark.parametrize(
    "name", ["model.safetensors", "tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"]
)
def test_a_copy_that_cannot_be_loaded_is_made_again(name: str, gguf: Path, own_cache: Path) -> None:
    copy = prepared_copy(gguf, "bf16", no_progress)
    whole = {file.name: file.read_bytes() for file in copy.iterdir()}
    (copy / name).write_bytes(bytes(len(whole[name])))
    assert load(gguf, "bf16").config.num_layers == 3
    assert {file.name: file.read_bytes() for file in copy.iterdir()} == whole
    assert leftovers(own_cache) == []


def test_a_copy_is_made_again_once_alone(gguf: Path) -> None:
    made, tried = [], []

    def prepare() -> Path:
        made.append(prepared_copy(gguf, "bf16", no_progress))
        return made[-1]

    def refuse(copy: Path) -> None:
        tried.append(copy)
        raise ModelFileError("it is of no use")

    with pytest.raises(ModelFileError, match="it is of no use"):
        loaded_copy(prepare, refuse)
    assert len(made) == len(tried) == 2


def test_a_copy_of_another_layout_is_made_again(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = prepared_copy(gguf, "bf16", no_progress)
    (copy / "left over").touch()
    monkeypatch.setattr(prepared, "LAYOUT_VERSION", prepared.LAYOUT_VERSION + 1)
    assert prepared_copy(gguf, "bf16", no_progress) == copy
    assert not (copy / "left over").exists()


# --- failure and interruption -----------------------------------------------------------------------------------------


def test_a_refused_file_leaves_nothing(tmp_path: Path, own_cache: Path) -> None:
    state = hf_state("llama")
    del state["model.layers.1.mlp.up_proj.weight"]
    path = write_tiny_gguf(tmp_path / "tiny.gguf", "llama", state)
    with pytest.raises(ModelFileError, match=r"does not fit its configuration: it lacks layers.1.mlp.up_proj.weight"):
        prepared_copy(path, "bf16", no_progress)
    assert [path.suffix for path in (own_cache / "prepared").iterdir()] == [".lock"]


def test_a_disk_that_fills_up_is_a_one_line_error_and_leaves_nothing(gguf: Path, own_cache: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(ModelFileError, match="File too large; free some space, or set KVIST_CACHE") as caught:
            prepared_copy(gguf, "bf16", no_progress)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(caught.value)
    assert leftovers(own_cache) == []
    assert prepared_copies() == []
    prepared_copy(gguf, "bf16", no_progress)


def test_too_little_space_is_told_before_anything_is_written(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_conversion, "write_tokenizer", None)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1_000_000 // 10}))
    with pytest.raises(ModelFileError, match="it needs 0 MB and 0 MB are free"):
        prepared_copy(gguf, "bf16", no_progress)


def test_an_error_of_the_disk_is_told_with_its_reason(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(quantised_weights, "write_safetensors", full)
    with pytest.raises(KvistError, match="No space left on device"):
        prepared_copy(gguf, "bf16", no_progress)


# A process that prepares a file, but stops half-way: with half the weights written it says so and waits.
MAKER = """
import sys, time
from pathlib import Path
from kvist.loading import quantised_weights
from kvist.loading.prepared import prepared_copy

wait, started, write = float(sys.argv[2]), Path(sys.argv[3]), quantised_weights.write_safetensors

def slowly(path, *rest):
    path.write_bytes(b"half")
    with started.open("a") as file:
        file.write("started\\n")
    time.sleep(wait)
    write(path, *rest)

quantised_weights.write_safetensors = slowly
print(prepared_copy(Path(sys.argv[1]), "bf16", lambda stage, done, total: None))
"""


def maker(gguf: Path, seconds: float, started: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", MAKER, str(gguf), str(seconds), str(started)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_two_processes_make_one_copy_and_both_get_it(gguf: Path, tmp_path: Path, own_cache: Path) -> None:
    started = tmp_path / "started"
    processes = [maker(gguf, 1.0, started) for _ in range(2)]
    results = [process.communicate(timeout=100) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], results
    assert results[0][0] == results[1][0]
    assert started.read_text() == "started\n", "only one of them may have made it"
    assert len(prepared_copies()) == 1
    assert leftovers(own_cache) == []


def test_a_killed_maker_leaves_only_what_the_next_removes(gguf: Path, tmp_path: Path, own_cache: Path) -> None:
    started = tmp_path / "started"
    process = maker(gguf, 1000, started)
    wait_for(started, process)
    process.kill()
    process.communicate()
    assert len(leftovers(own_cache)) == 1
    assert prepared_copies() == []
    prepared_copy(gguf, "bf16", no_progress)
    assert len(prepared_copies()) == 1
    assert leftovers(own_cache) == []


def test_an_interrupted_maker_leaves_nothing(gguf: Path, tmp_path: Path, own_cache: Path) -> None:
    started = tmp_path / "started"
    process = maker(gguf, 1000, started)
    wait_for(started, process)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert leftovers(own_cache) == []
    assert prepared_copies() == []
