"""A directory that a conversion makes: whole or not there, and never over what the user did not mean."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvist.convert.uptrain_checkpoint import FOLDER
from kvist.errors import OptionError
from kvist.loading.cache_folder import move_into_place
from kvist.memory import distinct_sizes


def checked_destination(path: str | os.PathLike[str], *, force: bool) -> Path:
    """Where a conversion may write; a link stays one.

    Args:
        path: as the user named it.
        force: whether it may take the place of a model that is there.

    Raises:
        OptionError: it exists and may not be replaced, or cannot be written.
    """
    target = Path(path).expanduser().resolve()
    if target.exists():
        if not target.is_dir():
            raise OptionError(f"{path} exists and is no folder: give the destination another name")
        if any(target.iterdir()):
            _check_is_a_model(path, target)
        if not force:
            raise OptionError(f"{path} exists: give --force to replace it, or take another name")
    if not target.parent.is_dir():
        raise OptionError(f"{path} cannot be made: there is no folder {target.parent}")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise OptionError(f"{path} cannot be made: {target.parent} cannot be written (permission denied)")
    return target


def _check_is_a_model(path: str | os.PathLike[str], target: Path) -> None:
    """Raise `OptionError` for a folder that holds anything but one: it would be removed whole."""
    if (target / FOLDER).exists():
        raise OptionError(
            f"{path} exists and a training waits in it, so it is not replaced: go on with it, remove {target / FOLDER} "
            "first, or take another name"
        )
    if folders := sorted(child.name for child in target.iterdir() if child.is_dir()):
        raise OptionError(
            f"{path} exists and holds the folder {folders[0]}, which is no part of a model, so it is not replaced: "
            "take another name"
        )
    if not (target / "config.json").is_file() or not any(target.glob("*.safetensors")):
        raise OptionError(f"{path} exists and holds no model, so it is not replaced: take another name")


def check_apart(target: Path, source: Path) -> None:
    """Raise `OptionError` where a destination is the source, holds it or lies in it."""
    source = source.resolve()
    if target == source or target in source.parents or source in target.parents:
        raise OptionError(f"{target} and the source {source} lie in one another: give the destination another name")


@contextmanager
def made_aside(target: Path) -> Iterator[Path]:
    """An empty directory to fill, which gets the target's name at the end; what was not finished is gone.

    Raises:
        OptionError: the system cannot write it, for instance since the disk is full.
    """
    try:
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
        try:
            made = work / "made"
            made.mkdir()
            yield made
            move_into_place(made, target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise OptionError(
            f"{target} cannot be written: {error.strerror or error}; nothing was left behind. Free some space, or take "
            "another folder"
        ) from error


def require_room(directory: Path, num_bytes: int) -> None:
    """Raise `OSError` where the disk of a directory has fewer bytes left."""
    if (free := shutil.disk_usage(directory).free) < num_bytes:
        raise OSError("it needs {} and {} are free".format(*distinct_sizes(num_bytes, free)))
