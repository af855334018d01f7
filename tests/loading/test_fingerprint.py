"""A model's fingerprint changes with all that its keys and values depend on, and with nothing else."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_files import hf_config, hf_state, write_tiny_directory, write_tiny_gguf

from kvist.errors import ModelFileError
from kvist.kernels.key_statics import KeyStatics
from kvist.loading import fingerprint, load
from kvist.loading.fingerprint import STATIC_NAMES, FilesHash, file_hash, model_fingerprint, statics_hash
from kvist.loading.prepared import prepared_copies
from kvist.loading.progress import Progress, no_progress

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


# --- kept hashes ------------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Two files that have not changed for a while."""
    paths = [tmp_path / name for name in ("one", "other")]
    for path in paths:
        path.write_bytes(path.name.encode())
        settle(path)
    return paths


def settle(path: Path, ago_s: float = 100) -> None:
    then_ns = time.time_ns() - int(ago_s * 1e9)
    os.utime(path, ns=(then_ns, then_ns))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are hashed."""
    names: list[str] = []

    def hashed(path: Path, progress: Progress) -> str:
        names.append(path.name)
        return file_hash(path, progress)

    monkeypatch.setattr(fingerprint, "file_hash", hashed)
    return names


def kept(cache: Path) -> Path:
    (path,) = (path for path in (cache / "hashes").iterdir() if path.suffix != ".lock")
    return path


def test_a_later_start_does_not_read_the_files_again(files: list[Path], read: list[str], own_cache: Path) -> None:
    first = FilesHash(files).get(no_progress)
    assert FilesHash(files).get(no_progress) == first
    assert read == ["one", "other"]
    assert json.loads(kept(own_cache).read_text())["hash"] == first
    assert FilesHash(files[::-1]).get(no_progress) != first
    assert len(read) == 4


def test_a_later_start_computes_no_statics_and_reads_no_weights(tmp_path: Path, read: list[str]) -> None:
    directory = write_tiny_directory(tmp_path / "model")
    for path in directory.iterdir():
        settle(path)
    first = load(directory, "fp32").key_statics()
    assert read == ["config.json", "model.safetensors"]
    assert statics_hash(load(directory, "fp32").key_statics()) == statics_hash(first)
    assert len(read) == 2


def resized(path: Path) -> None:
    stat = path.stat()
    path.write_bytes(b"more than before")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def replaced(path: Path) -> None:
    stat = path.stat()
    beside = path.with_name("beside")
    beside.write_bytes(b"eno")
    os.utime(beside, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    beside.replace(path)


def rewritten(path: Path) -> None:
    path.write_bytes(b"eno")
    settle(path, ago_s=50)


@pytest.mark.parametrize("change", [resized, replaced, rewritten])
def test_a_file_of_another_size_time_or_inode_is_read_again(
    change: Callable[[Path], None], files: list[Path], read: list[str]
) -> None:
    first = FilesHash(files).get(no_progress)
    change(files[0])
    second = FilesHash(files).get(no_progress)
    assert second != first
    assert len(read) == 4
    assert FilesHash(files).get(no_progress) == second
    assert len(read) == 4


def test_a_file_that_was_just_written_is_read_each_time(files: list[Path], read: list[str], own_cache: Path) -> None:
    files[1].write_bytes(b"new")
    for _ in range(2):
        FilesHash(files).get(no_progress)
    assert len(read) == 4
    assert not (own_cache / "hashes").exists()


KEPT_DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "emptied": lambda path: path.write_bytes(b""),
    "no object": lambda path: path.write_text("[]"),
    "no hash": lambda path: path.write_text(json.dumps({"files": json.loads(path.read_text())["files"]})),
    "a hash that is none": lambda path: path.write_text(
        json.dumps(json.loads(path.read_text()) | {"hash": "../" * 10 + "ab"})
    ),
    "a number": lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | {"hash": 7})),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("damage", KEPT_DAMAGE)
def test_a_damaged_hash_is_made_again(damage: str, files: list[Path], read: list[str], own_cache: Path) -> None:
    first = FilesHash(files).get(no_progress)
    whole = kept(own_cache).read_bytes()
    KEPT_DAMAGE[damage](kept(own_cache))
    assert FilesHash(files).get(no_progress) == first
    assert len(read) == 4
    assert kept(own_cache).read_bytes() == whole


def test_a_cache_folder_that_cannot_be_written_costs_a_reading(
    files: list[Path], read: list[str], own_cache: Path
) -> None:
    own_cache.write_text("a file")
    assert len({FilesHash(files).get(no_progress) for _ in range(2)}) == 1
    assert len(read) == 4


# --- the fingerprint --------------------------------------------------------------------------------------------------


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
