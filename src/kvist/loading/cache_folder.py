"""Kvist's folder on this machine, and how a file or folder gets there whole or not at all.

    models/     demo models, one file each
    prepared/   what was costly to make from a GGUF file, one folder per file and weights_format
    statics/    the statics of quantised keys, one file per model and weights_format
    hashes/     the hashes of models' files, one file per model

Whatever is being made lies beside its target under a name that ends in `.partial`, under a lock; so a `.partial` that
is found while holding the lock was left by a process that died, and is removed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvist.errors import OptionError
from kvist.loading.progress import Progress

_PARTIAL = ".partial"


def cache_folder() -> Path:
    """`KVIST_CACHE`, else `kvist` in `XDG_CACHE_HOME`, else `~/.cache/kvist`. It need not exist.

    Raises:
        OptionError: it lies in the home folder, and there is none.
    """
    if chosen := os.environ.get("KVIST_CACHE"):
        return _expanded(chosen).absolute()
    base = _expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    # The standard asks to ignore a relative path.
    return (base if base.is_absolute() else _expanded("~/.cache")) / "kvist"


def _expanded(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise OptionError(f"the cache folder {path} is in no known home folder: set KVIST_CACHE to a folder") from error


def make_folder(name: str) -> Path:
    """A folder inside the cache folder, made if missing; `OptionError` if it cannot be written."""
    folder = cache_folder() / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK | os.X_OK)
    except OSError as error:
        raise OptionError(_unusable(folder, error.strerror or str(error))) from error
    if not writable:
        raise OptionError(_unusable(folder, "permission denied"))
    return folder


def _unusable(folder: Path, reason: str) -> str:
    return f"the cache folder {folder} cannot be written ({reason}): set KVIST_CACHE to a folder that can"


@contextmanager
def only_process(target: Path, progress: Progress) -> Iterator[Path]:
    """Hold the right to make `target`, waiting for any other process that does; yields an empty folder to make it in.

    The folder is removed at the end, however that comes; what should stay is moved out of it by `move_into_place`.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(target.with_name(target.name + ".lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress(f"waiting for another process that makes {target.name}", 0, None)
        lock.acquire()
    try:
        for left_over in target.parent.glob(f"{target.name}.*{_PARTIAL}"):
            shutil.rmtree(left_over, ignore_errors=True)
        work = Path(tempfile.mkdtemp(prefix=f"{target.name}.", suffix=_PARTIAL, dir=target.parent))
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)
    finally:
        lock.release()


def move_into_place(made: Path, target: Path) -> None:
    """Give a finished file or folder its name, at once; what had that name before goes away. Outlives a power cut.

    A folder that had the name is left beside `made`, for whoever made that to remove; where the move fails or is
    interrupted, it has its name back.
    """
    _sync(made)
    old = made.with_name(made.name + ".old")
    try:
        if target.is_dir():
            target.replace(old)
        made.replace(target)
    except BaseException:
        if old.is_dir() and not target.exists():
            old.replace(target)
        raise
    _sync_folder(target.parent)


def _sync(path: Path) -> None:
    if path.is_dir():
        for child in path.iterdir():
            _sync(child)
        _sync_folder(path)
        return
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
