"""The statics of quantised keys are computed once for a model, and are the same bits ever after."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_files import hf_config, hf_state, write_tiny_directory, write_tiny_gguf

from kvist.errors import NumericsError, OptionError
from kvist.kernels.key_statics import KeyStatics
from kvist.loading import fingerprint, key_calibration, load, statics_file
from kvist.loading.cache_folder import only_process
from kvist.loading.fingerprint import STATIC_NAMES, statics_hash
from kvist.loading.loader import LoadedModel
from kvist.loading.prepared import prepared_copies
from kvist.loading.progress import Progress
from kvist.loading.statics_file import read_statics

pytestmark = pytest.mark.usefixtures("own_cache")

Calls = list[int]


@pytest.fixture
def model(tmp_path: Path) -> LoadedModel:
    return load(write_tiny_directory(tmp_path / "model"), "fp32")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The number of tokens of each calibration."""
    numbers: Calls = []
    calibrate = key_calibration.calibrate

    def counted(decoder: object, token_ids: list[int], progress: object) -> object:
        numbers.append(len(token_ids))
        return calibrate(decoder, token_ids, progress)  # type: ignore[arg-type]

    monkeypatch.setattr(key_calibration, "calibrate", counted)
    return numbers


def same_bits(one: Sequence[KeyStatics], other: Sequence[KeyStatics]) -> bool:
    return all(
        torch.equal(getattr(a, name), getattr(b, name)) and getattr(a, name).dtype == getattr(b, name).dtype
        for a, b in zip(one, other, strict=True)
        for name in STATIC_NAMES
    )


def kept_files(cache: Path) -> list[Path]:
    return sorted(path for path in (cache / "statics").iterdir() if path.suffix != ".lock")


# --- computed once ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights_format", ["bf16", "fp32"])
def test_a_later_start_reads_the_bits_of_the_first(
    weights_format: str, tmp_path: Path, own_cache: Path, calls: Calls
) -> None:
    directory = write_tiny_directory(tmp_path / "model", num_shards=2)
    computed = load(directory, weights_format).key_statics()
    assert same_bits(load(directory, weights_format).key_statics(), computed)
    assert calls == [512]
    assert len(computed) == 3
    assert len(kept_files(own_cache)) == 1


def test_a_gguf_files_values_stand_beside_its_prepared_copy_which_stays_whole(
    tmp_path: Path, own_cache: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    model = load(path)
    with monkeypatch.context() as patched:
        patched.setattr(fingerprint, "file_hash", None)  # it was read for the copy, and is not again
        computed = model.key_statics()
    assert same_bits(load(path).key_statics(), computed)
    (copy,) = prepared_copies()
    assert calls == [512]
    assert kept_files(own_cache)[0].name.startswith(copy.path.name)
    assert copy.path.parent == own_cache / "prepared"


def test_they_belong_to_weights_configuration_format_and_recipe(
    tmp_path: Path, own_cache: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_tiny_directory(tmp_path / "model")
    models = [load(directory, "fp32"), load(directory, "bf16")]
    models.append(load(write_tiny_directory(tmp_path / "weights", hf_state("llama", seed=1)), "fp32"))
    models.append(load(write_tiny_directory(tmp_path / "config", config=hf_config(rope_theta=1e4)), "fp32"))
    statics = [model.key_statics() for model in models]
    assert len(calls) == 4
    assert not any(same_bits(statics[0], other) for other in statics[1:])
    monkeypatch.setattr(key_calibration, "_RECIPE_VERSION", key_calibration._RECIPE_VERSION + 1)
    models[0].key_statics()
    assert len(calls) == 5
    assert len(kept_files(own_cache)) == 5
    moved = (tmp_path / "model").rename(tmp_path / "elsewhere")
    assert len({load(moved, "fp32").fingerprint(), models[0].fingerprint()}) == 1


def test_progress_tells_what_takes_long(model: LoadedModel) -> None:
    stages: list[str] = []
    model.key_statics(lambda stage, done, total: stages.append(stage))
    assert list(dict.fromkeys(stages)) == [
        "reading config.json", "reading model.safetensors", "fitting the quantised keys to the model",
    ]  # fmt: skip


# --- damage -----------------------------------------------------------------------------------------------------------


def changed_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    """Rewrites a file with other tensors, and a hash that fits them as far as they are all there."""

    def rewrite(path: Path) -> None:
        tensors = load_file(path)
        change(tensors)
        try:
            layers = tuple(
                KeyStatics(**{name: tensors[f"layers.{i}.{name}"] for name in STATIC_NAMES}) for i in range(3)
            )
            save_file(tensors, path, {"hash": statics_hash(layers)})
        except KeyError:
            save_file(tensors, path, {"hash": "0"})

    return rewrite


def flipped_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: os.truncate(path, path.stat().st_size - 4),
    "emptied": lambda path: path.write_bytes(b""),
    "garbage": lambda path: path.write_bytes(b"\xff" * 5000),
    "a header that claims more than there is": lambda path: path.write_bytes((2**40).to_bytes(8, "little") + b"{}"),
    "a flipped bit": flipped_bit,
    "no hash": lambda path: save_file(load_file(path), path),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "unreadable": lambda path: (path.unlink(), path.symlink_to("/proc/self/mem")),
    "a tensor less": changed_tensors(lambda tensors: tensors.pop("layers.2.scale")),
    "a tensor more": changed_tensors(lambda tensors: tensors.update({"layers.3.scale": torch.ones(2, 32)})),
    "another shape": changed_tensors(lambda t: t.update({"layers.1.offset": t["layers.1.offset"].T.contiguous()})),
    "another dtype": changed_tensors(lambda t: t.update({"layers.1.offset": t["layers.1.offset"].half()})),
    "NaN": changed_tensors(lambda tensors: tensors["layers.0.offset"].fill_(float("nan"))),
    "infinity": changed_tensors(lambda tensors: tensors["layers.2.feedback"][0, 0, 0].fill_(float("inf"))),
    "a scale of zero": changed_tensors(lambda tensors: tensors["layers.1.scale"][0].fill_(0.0)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_made_again(damage: str, model: LoadedModel, own_cache: Path, calls: Calls) -> None:
    computed = model.key_statics()
    (path,) = kept_files(own_cache)
    whole = path.read_bytes()
    assert read_statics(path, model.config.layers) is not None
    DAMAGE[damage](path)
    assert read_statics(path, model.config.layers) is None
    assert same_bits(model.key_statics(), computed)
    assert len(calls) == 2
    assert kept_files(own_cache) == [path]
    assert path.read_bytes() == whole


def test_a_file_of_other_layers_is_not_taken(model: LoadedModel, own_cache: Path) -> None:
    model.key_statics()
    (path,) = kept_files(own_cache)
    layers = model.config.layers
    assert read_statics(path, layers) is not None
    assert read_statics(path, layers[:2]) is None
    assert read_statics(path, [*layers, layers[0]]) is None
    assert read_statics(path, [replace(layer, num_kv_heads=4) for layer in layers]) is None


def test_what_was_read_outlives_its_file(model: LoadedModel, own_cache: Path) -> None:
    computed = model.key_statics()
    read = model.key_statics()
    (path,) = kept_files(own_cache)
    with path.open("r+b") as file:
        file.truncate(0)
    assert same_bits(read, computed)


# --- where they cannot be kept ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["no permission", "read-only", "no folder"])
def test_a_cache_folder_that_cannot_be_written_is_told_and_gone_without(
    where: str, model: LoadedModel, own_cache: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    match where:
        case "no permission":
            monkeypatch.setattr(os, "access", lambda path, mode: False)
        case "read-only":
            (own_cache / "statics").mkdir(parents=True)
            monkeypatch.setattr("tempfile.mkdtemp", refuse)
        case "no folder":
            own_cache.write_text("a file")
    with pytest.warns(RuntimeWarning, match="are not kept, so each start computes them again: ") as warned:
        first = model.key_statics()
    assert "\n" not in str(warned[0].message)
    with pytest.warns(RuntimeWarning, match="are not kept"):
        assert same_bits(model.key_statics(), first)
    assert len(calls) == 2


def refuse(*_: object, **__: object) -> None:
    raise PermissionError(errno.EROFS, os.strerror(errno.EROFS))


def test_what_is_kept_is_read_from_a_folder_that_cannot_be_written(
    model: LoadedModel, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = model.key_statics()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr(Path, "mkdir", refuse)
    assert same_bits(model.key_statics(), computed)
    assert len(calls) == 1


def test_a_disk_that_is_full_is_told_and_leaves_nothing(model: LoadedModel, own_cache: Path, calls: Calls) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.warns(RuntimeWarning, match="are not kept, so each start computes them again: File too large"):
            computed = model.key_statics()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert kept_files(own_cache) == []
    assert same_bits(model.key_statics(), computed)
    assert len(kept_files(own_cache)) == 1


def test_a_model_that_gives_no_numbers_leaves_nothing(tmp_path: Path, own_cache: Path) -> None:
    state = hf_state("llama")
    state["model.layers.1.self_attn.k_proj.weight"][0, 0] = float("nan")
    model = load(write_tiny_directory(tmp_path / "model", state), "fp32")
    for _ in range(2):
        with pytest.raises(NumericsError, match="in layer 1 are not numbers"):
            model.key_statics()
    assert kept_files(own_cache) == []


def test_a_model_with_a_short_context_takes_less_of_the_text_or_is_refused(
    tmp_path: Path, own_cache: Path, calls: Calls
) -> None:
    short = hf_config(max_position_embeddings=100)
    assert len(load(write_tiny_directory(tmp_path / "short", config=short), "fp32").key_statics()) == 3
    assert calls == [100]
    model = load(write_tiny_directory(tmp_path / "shorter", config=short | {"max_position_embeddings": 50}), "fp32")
    with pytest.raises(OptionError, match="64 tokens of text at least, and this model takes 50"):
        model.key_statics()
    assert len(kept_files(own_cache)) == 1


# --- several processes ------------------------------------------------------------------------------------------------

# A process that asks for the values; computing them takes it a second more.
ASKER = """
import json, sys, time
from pathlib import Path
from kvist.loading import key_calibration, load
from kvist.loading.fingerprint import statics_hash

calibrate = key_calibration.calibrate

def slowly(*arguments):
    with Path(sys.argv[2]).open("a") as file:
        file.write("started\\n")
    time.sleep(1.0)
    return calibrate(*arguments)

key_calibration.calibrate = slowly
stages = []
statics = load(sys.argv[1], "fp32").key_statics(lambda stage, done, total: stages.append(stage))
print(json.dumps([statics_hash(statics), stages]))
"""


def test_what_another_process_made_while_this_one_waited_is_read(
    model: LoadedModel, own_cache: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = model.key_statics()
    (path,) = kept_files(own_cache)
    path.rename(own_cache / "theirs")

    @contextmanager
    def waiting(target: Path, progress: Progress) -> Iterator[Path]:
        with only_process(target, progress) as work:
            (own_cache / "theirs").rename(target)
            yield work

    monkeypatch.setattr(statics_file, "only_process", waiting)
    assert same_bits(model.key_statics(), theirs)
    assert len(calls) == 1


def test_two_processes_compute_once_and_both_get_the_same_bits(tmp_path: Path, own_cache: Path) -> None:
    directory, started = write_tiny_directory(tmp_path / "model"), tmp_path / "started"
    command = [sys.executable, "-c", ASKER, str(directory), str(started)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    results = [process.communicate(timeout=100) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], results
    assert started.read_text() == "started\n", "only one of them may have computed"
    (first_hash, _), (second_hash, _) = (json.loads(out) for out, _ in results)
    assert first_hash == second_hash == statics_hash(load(directory, "fp32").key_statics())
    assert len(kept_files(own_cache)) == 1
