"""A directory that a conversion makes: whole or not there, and never over what the user did not mean."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvist.convert.model_files import carried_files, foreign_file
from kvist.convert.uptrain_checkpoint import FOLDER
from kvist.errors import OptionError
from kvist.loading.cache_folder import move_into_place
from kvist.memory import distinct_sizes

_PARTIAL = ".partial"
_MADE = "made"
_MOVED_ASIDE = f"{_MADE}.old"  # as `move_into_place` calls it


class Destination:
    """Where a conversion writes; a link stays one.

    Args:
        named: as the user named it.
        force: whether it may take the place of a model that is there.
    """

    def __init__(self, named: str | os.PathLike[str], *, force: bool) -> None:
        self._named = named
        self._force = force
        self._path = Path(named).expanduser().resolve()

    def check(self, source: Path, directory: Path | None = None) -> None:
        """Raise `OptionError` where it exists and may not be replaced, or cannot be made.

        What a conversion that was killed left of the same destination goes away before; a model that it had moved aside
        gets its name back.

        Args:
            source: what is converted; it need not be there.
            directory: the source in Hugging Face format, once that is known: what is carried from it may lie here.
        """
        path, named = self._path, self._named
        _remove_left_over(path)
        if source.expanduser().exists():  # others are names
            self._check_apart(source.expanduser().resolve())
        if path.exists():
            if not path.is_dir():
                raise OptionError(f"{named} exists and is no folder: give the destination another name")
            if any(path.iterdir()):
                self._check_is_a_model(directory)
            if not self._force:
                raise OptionError(f"{named} exists: give --force to replace it, or take another name")
        if not path.parent.is_dir():
            raise OptionError(f"{named} cannot be made: there is no folder {path.parent}")
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise OptionError(f"{named} cannot be made: {path.parent} cannot be written (permission denied)")

    @contextmanager
    def made_aside(self, directory: Path) -> Iterator[Path]:
        """An empty directory to fill, which gets its name at the end; what was not finished is gone.

        Args:
            directory: as for `check`. What came to lie here meanwhile is looked at in the same way.

        Raises:
            OptionError: the system cannot write it, for instance since the disk is full, or it may not be replaced.
        """
        target = self._path
        try:
            work = Path(tempfile.mkdtemp(prefix=_prefix(target), suffix=_PARTIAL, dir=target.parent))
            try:
                with _held(work):
                    made = work / _MADE
                    made.mkdir()
                    yield made
                    self.check(directory, directory)
                    move_into_place(made, target)
            finally:
                shutil.rmtree(work, ignore_errors=True)
        except OSError as error:
            raise OptionError(
                f"{target} cannot be written: {error.strerror or error}; nothing was left behind. Free some space, or "
                "take another folder"
            ) from error

    def _check_apart(self, source: Path) -> None:
        target = self._path
        if target == source or target in source.parents or source in target.parents:
            raise OptionError(f"{target} and the source {source} lie in one another: give the destination another name")

    def _check_is_a_model(self, directory: Path | None) -> None:
        """Raise for a folder that holds anything but one: it would be removed whole."""
        path, named = self._path, self._named
        if (path / FOLDER).exists():
            raise OptionError(
                f"{named} exists and a training waits in it, so it is not replaced: go on with it, remove "
                f"{path / FOLDER} first, or take another name"
            )
        if not (path / "config.json").is_file() or not any(path.glob("*.safetensors")):
            raise OptionError(f"{named} exists and holds no model, so it is not replaced: take another name")
        if directory is None:  # what belongs to a model is not known yet
            return
        carried = frozenset(file.name for file in carried_files(directory))
        if foreign := foreign_file(path, carried):
            kind = "folder" if foreign.is_dir() else "file"
            raise OptionError(
                f"{named} exists and holds the {kind} {foreign.name}, which is no part of a model, so it is not "
                "replaced: move it elsewhere, or take another name"
            )


def _prefix(target: Path) -> str:
    return f".{target.name}."


def _remove_left_over(target: Path) -> None:
    """Drop what processes that were killed left of the same directory; others hold theirs."""
    with suppress(OSError):
        for work in sorted(target.parent.iterdir()):
            if work.name.startswith(_prefix(target)) and work.name.endswith(_PARTIAL) and work.is_dir():
                with suppress(OSError), _held(work):
                    if not target.exists() and (old := work / _MOVED_ASIDE).is_dir():
                        old.replace(target)
                    shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Hold a folder until the end of the block, or of the process; `OSError` where another does."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def require_room(directory: Path, num_bytes: int) -> None:
    """Raise `OSError` where the disk of a directory has fewer bytes left."""
    if (free := shutil.disk_usage(directory).free) < num_bytes:
        raise OSError("it needs {} and {} are free".format(*distinct_sizes(num_bytes, free)))
