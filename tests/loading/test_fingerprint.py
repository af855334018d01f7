"""A model's fingerprint changes with all that its keys and values depend on, and with nothing else."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_files import hf_config, hf_state, write_tiny_directory, write_tiny_gguf

from kvist.errors import ModelFileError
from kvist.kernels.key_statics import KeyStatics
from kvist.loading import load
from kvist.loading.fingerprint import STATIC_NAMES, FilesHash, file_hash, model_fingerprint, statics_hash
from kvist.loading.prepared import prepared_copies
from kvist.loading.progress import no_progress

pytestmark = pytest.mark.usefixtures("own_cache")


def statics(seed: int = 0) -> tuple[KeyStatics, ...]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"offset": (2, 8), "scale": (2, 8), "feedback": (2, 1, 8, 8), "frequencies": (4,)}
    return tuple(
        KeyStatics(**{name: torch.randn(shapes[name], generator=generator) for name in STATIC_NAMES}) for _ in range(2)
    )


def test_the_hash_of_a_file_is_that_of_its_bytes(tmp_path: Path) -> None:
    import xxhash

    data = bytes(range(256)) * 40_000  # several reads
    (tmp_path / "file").write_bytes(data)
    seen: list[tuple[str, int, int | None]] = []
    found = file_hash(tmp_path / "file", lambda *report: seen.append(report))
    assert found == xxhash.xxh3_128_hexdigest(data)
    assert seen[-1] == ("reading file", len(data), len(data))
    with pytest.raises(ModelFileError, match="absent cannot be read: No such file"):
        file_hash(tmp_path / "absent", no_progress)


def test_files_are_read_once_and_when_they_are_asked_for(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("one", "other")]
    files_hash = FilesHash(paths)
    for path in paths:
        path.write_bytes(path.name.encode())
    first = files_hash.get(no_progress)
    for path in paths:
        path.unlink()
    assert files_hash.get(no_progress) == first
    with pytest.raises(ModelFileError, match="cannot be read"):
        FilesHash(paths).get(no_progress)
    assert FilesHash(paths, "known").get(no_progress) == "known"


def test_bytes_that_move_from_one_file_to_the_next_are_seen(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("one", "other")]
    hashes = set()
    for contents in ((b"ab", b"c"), (b"a", b"bc"), (b"c", b"ab"), (b"abc", b"")):
        for path, data in zip(paths, contents, strict=True):
            path.write_bytes(data)
        hashes.add(FilesHash(paths).get(no_progress))
    assert len(hashes) == 4


def test_it_differs_where_keys_and_values_may(tmp_path: Path) -> None:
    directory = write_tiny_directory(tmp_path / "model")
    model = load(directory, "fp32")
    fingerprints = {
        model.fingerprint(),
        model.fingerprint(statics(0)),
        model.fingerprint(statics(1)),
        load(directory, "bf16").fingerprint(),
        load(write_tiny_directory(tmp_path / "weights", hf_state("llama", seed=1)), "fp32").fingerprint(),
        load(write_tiny_directory(tmp_path / "config", config=hf_config(rope_theta=1e4)), "fp32").fingerprint(),
        load(write_tiny_gguf(tmp_path / "tiny.gguf"), "fp32").fingerprint(),
    }
    assert len(fingerprints) == 7


def test_it_stays_where_files_move_or_stand_beside_others(tmp_path: Path) -> None:
    first = load(write_tiny_directory(tmp_path / "model", num_shards=3), "fp32").fingerprint()
    copy = write_tiny_directory(tmp_path / "copy", num_shards=3)
    (copy / "adapter.safetensors").write_bytes(b"something else")
    (copy / "README.md").write_text("hello")
    assert load(copy, "fp32").fingerprint() == first


def test_a_gguf_files_is_the_name_of_its_copy(tmp_path: Path) -> None:
    model = load(write_tiny_gguf(tmp_path / "tiny.gguf"))
    (copy,) = prepared_copies()
    assert model.fingerprint() == copy.path.name


@pytest.mark.parametrize("name", STATIC_NAMES)
def test_one_bit_of_any_static_value_changes_it(name: str) -> None:
    one, *others = statics()
    value = getattr(one, name).clone()
    value.view(torch.int32).view(-1)[-1] ^= 1
    assert statics_hash((replace(one, **{name: value}), *others)) != statics_hash((one, *others))


def test_it_is_a_short_word() -> None:
    plain, quantised = (model_fingerprint("0" * 32, "bf16", of) for of in (None, statics()))
    assert plain == "0" * 32 + "-bf16"
    assert re.fullmatch(r"0{32}-bf16-[0-9a-f]{32}", quantised)
