"""What tells one model from another: the bytes of its files, and the statics of its quantised keys."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvist.errors import ModelFileError, OptionError
from kvist.loading.cache_folder import cache_folder, make_folder, move_into_place, only_process
from kvist.loading.progress import Progress, no_progress
from kvist.loading.untrusted_file import read_json, write_json

if TYPE_CHECKING:
    from kvist.kernels.key_statics import KeyStatics

_HASHED_AT_ONCE = 4 << 20
_FOLDER = "hashes"
# Two changes within a tick of the file system's clock leave the same time: only older files are known by theirs.
_SETTLED_NS = 2_000_000_000

# The tensors of a layer's statics, in the order in which they are hashed.
STATIC_NAMES = ("offset", "scale", "feedback", "frequencies")


def file_hash(path: Path, progress: Progress) -> str:
    """The XXH3 hash of a file, 32 hexadecimal digits; `ModelFileError` if it cannot be read."""
    import xxhash

    digest, done = xxhash.xxh3_128(), 0
    try:
        total = path.stat().st_size
        with path.open("rb", buffering=0) as file:
            buffer = memoryview(bytearray(_HASHED_AT_ONCE))
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
                done += count
                progress(f"reading {path.name}", done, total)
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror}") from error
    return digest.hexdigest()


class FilesHash:
    """The hash of a model's files, which is computed when it is first asked for: it reads all of them.

    It is kept in the cache folder, and taken from there while each file has its path, size, time and inode.

    Args:
        files: in the order in which they count.
        known: the hash, where it was needed before.
    """

    def __init__(self, files: Sequence[Path], known: str | None = None) -> None:
        self._files = tuple(files)
        self._known = known
        self._lock = threading.Lock()

    def get(self, progress: Progress) -> str:
        """32 hexadecimal digits; `ModelFileError` if a file cannot be read any more."""
        with self._lock:
            if self._known is None:
                self._known = self._kept_or_computed(progress)
            return self._known

    def _kept_or_computed(self, progress: Progress) -> str:
        import xxhash

        states = _file_states(self._files)  # before they are read: who changes them meanwhile changes their time
        paths = b"\0".join(map(_path_bytes, self._files))
        kept = cache_folder() / _FOLDER / f"{xxhash.xxh3_128_hexdigest(paths)}.json"
        if states is not None and (known := _read_hash(kept, states)) is not None:
            return known
        hashes = [file_hash(file, progress) for file in self._files]
        found = xxhash.xxh3_128_hexdigest("\n".join(hashes).encode())
        if states is not None:
            _keep_hash(kept, states, found)
        return found


def _file_states(files: Sequence[Path]) -> list[dict[str, object]] | None:
    """What each file is known by; None where one is missing, or so new that it may change and look the same."""
    try:
        stats = [file.stat() for file in files]
    except OSError:  # whoever reads the file says it better
        return None
    if any(time.time_ns() - stat.st_mtime_ns < _SETTLED_NS for stat in stats):
        return None
    return [
        {"path": _path_bytes(file).decode(errors="backslashreplace"), "size": stat.st_size}
        | {"mtime_ns": stat.st_mtime_ns, "inode": stat.st_ino}
        for file, stat in zip(files, stats, strict=True)
    ]


def _path_bytes(file: Path) -> bytes:
    return os.fsencode(file.absolute())


def _read_hash(kept: Path, states: list[dict[str, object]]) -> str | None:
    """The hash that a file holds for files in such states; None where it is damaged or they have changed."""
    try:
        fields = read_json(kept)
    except (ModelFileError, OSError):
        return None
    found = fields.get("hash")
    is_hash = isinstance(found, str) and re.fullmatch(r"[0-9a-f]{32}", found)
    return str(found) if is_hash and fields.get("files") == states else None


def _keep_hash(kept: Path, states: list[dict[str, object]], found: str) -> None:
    """Where the cache folder cannot be written the files are read again next time."""
    try:
        make_folder(_FOLDER)
        with only_process(kept, no_progress) as work:
            write_json(work / kept.name, {"hash": found, "files": states})
            move_into_place(work / kept.name, kept)
    except (OptionError, OSError):
        return


def statics_hash(statics: Sequence[KeyStatics]) -> str:
    """The hash of the statics of all layers, 32 hexadecimal digits."""
    import xxhash

    digest = xxhash.xxh3_128()
    for layer in statics:
        for name in STATIC_NAMES:
            digest.update(getattr(layer, name).cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def model_fingerprint(files_hash: str, weights_format: str, statics: Sequence[KeyStatics] | None) -> str:
    """What keys and values in a cache depend on besides their format; `statics` where its keys are quantised."""
    parts = [files_hash, weights_format]
    return "-".join(parts if statics is None else [*parts, statics_hash(statics)])
