"""Prepared copies: what is costly to make from a model's files, made once and kept.

    <hash of the files>-<weights_format>/
        model.safetensors   all weights
        packed.json         the formats of packed matrices, where weights are quantised
        prepared.json       what it was made from, by which layout, and the size of every other file

    of a GGUF file also
        config.json  generation_config.json  tokenizer.json  tokenizer_config.json

A GGUF file's copy without packed matrices is loaded exactly as any other directory in Hugging Face format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kvist.errors import ModelFileError, UnsupportedModelError
from kvist.loading.cache_folder import cache_folder, make_folder, move_into_place, only_process
from kvist.loading.fingerprint import file_hash
from kvist.loading.progress import Progress
from kvist.loading.untrusted_file import read_json, require_gguf, write_json

# Raise it whenever the same file would be prepared differently, its tokenizer included: older copies are then remade.
LAYOUT_VERSION = 4

_MANIFEST = "prepared.json"

Loaded = TypeVar("Loaded")


def prepared_copy(gguf_path: Path, weights_format: str, progress: Progress) -> Path:
    """The directory in Hugging Face format for a GGUF file, made if it is not there yet.

    Safe against other processes and against being interrupted; a damaged copy is made again.

    Raises:
        ModelFileError: the file is damaged, or there is no room for the copy.
        UnsupportedModelError: the file holds a model that is not run.
    """
    require_gguf(gguf_path)  # before all of it is read

    def make(directory: Path) -> None:
        from kvist.loading.gguf_conversion import convert_gguf  # needs torch, which listing the copies does not

        convert_gguf(gguf_path, weights_format, directory, progress)

    return prepared_weights(gguf_path.name, file_hash(gguf_path, progress), weights_format, make, progress)


def prepared_weights(
    source: str, files_hash: str, weights_format: str, make: Callable[[Path], None], progress: Progress
) -> Path:
    """The directory with a model's weights in a format, made by `make` if it is not there yet.

    As `prepared_copy`, for files whose configuration and tokenizer are used where they lie.

    Args:
        source: what the model goes by.
        files_hash: of all its files.
        make: writes the weights into an empty directory.
    """
    target = cache_folder() / "prepared" / f"{files_hash}-{weights_format}"
    if _is_whole(target):
        return target
    make_folder("prepared")
    try:
        with only_process(target, progress) as work:
            if not _is_whole(target):  # another process may have made it meanwhile
                made = work / "copy"
                made.mkdir()
                make(made)
                _seal(made, source, weights_format)
                move_into_place(made, target)
    except OSError as error:
        raise ModelFileError(
            f"cannot keep a prepared copy of {source} in {target.parent}: {error.strerror or error}; "
            "free some space, or set KVIST_CACHE to another folder"
        ) from error
    return target


def loaded_copy(prepare: Callable[[], Path], load: Callable[[Path], Loaded]) -> Loaded:
    """What `load` makes of the copy that `prepare` gives.

    A copy that cannot be loaded was damaged in a way that its files' sizes do not show: it is made again, once.
    """
    copy = prepare()
    try:
        return load(copy)
    except (ModelFileError, UnsupportedModelError):
        with suppress(OSError):  # a cache folder that cannot be written
            (copy / _MANIFEST).unlink(missing_ok=True)
        if _is_whole(copy):
            raise
    return load(prepare())


def source_hash(copy: Path) -> str:
    """The hash of the GGUF file that a copy was made from."""
    return copy.name.partition("-")[0]


@dataclass(frozen=True)
class PreparedCopy:
    """A copy in the cache folder, as `kvist models` lists it."""

    path: Path
    source: str
    weights_format: str
    num_bytes: int


def prepared_copies() -> list[PreparedCopy]:
    """All whole copies in the cache folder; nothing is written, so the folder need not be writable, nor exist."""
    copies = []
    for manifest in sorted((cache_folder() / "prepared").glob(f"*/{_MANIFEST}")):
        path = manifest.parent
        if not _is_whole(path):
            continue
        try:
            fields = read_json(manifest)
            size = sum(file.stat().st_size for file in path.iterdir())
        except (ModelFileError, OSError):  # it went away meanwhile
            continue
        copies.append(PreparedCopy(path, str(fields.get("source")), str(fields.get("weights_format")), size))
    return copies


def _is_whole(copy: Path) -> bool:
    """Whether every file of the copy is there in its size, and of this layout."""
    try:
        manifest = read_json(copy / _MANIFEST)
    except ModelFileError:
        return False
    sizes = manifest.get("files")
    if manifest.get("layout") != LAYOUT_VERSION or not isinstance(sizes, Mapping):
        return False
    return all((copy / name).is_file() and (copy / name).stat().st_size == size for name, size in sizes.items())


def _seal(copy: Path, source: str, weights_format: str) -> None:
    """Write down what the copy holds; it counts as whole only with this."""
    sizes = {file.name: file.stat().st_size for file in sorted(copy.iterdir())}
    manifest = {"layout": LAYOUT_VERSION, "source": source, "weights_format": weights_format, "files": sizes}
    write_json(copy / _MANIFEST, manifest)
