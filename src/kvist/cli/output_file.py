"""Files that a verb writes at its end: refused at its start where they cannot be written, and whole or not there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from kvist.errors import OptionError

_DASH = Path("-")  # standard input or output


class OutputFile:
    """A file that is still to be written.

    Args:
        option: that names it.
        path: as the user named it.
        target: where that leads.
        aside: a file beside it to write to first; the target itself where that is a device or a pipe.
    """

    def __init__(self, option: str, path: Path, target: Path, aside: Path) -> None:
        self._named = f"{option} {path}"
        self._target = target
        self._aside = aside

    def write(self, write: Callable[[Path], object]) -> None:
        """Let `write` fill a file, and give that its name. What had the name before goes away.

        Raises:
            OptionError: the system cannot write it.
        """
        from kvist.loading.cache_folder import move_into_place

        try:
            write(self._aside)
            if self._aside != self._target:
                move_into_place(self._aside, self._target)
        except OSError as error:
            raise OptionError(f"{self._named} cannot be written: {error.strerror or error}") from error


@contextmanager
def output_file(option: str, path: Path | None) -> Iterator[OutputFile | None]:
    """A file to write within; what was not finished is gone at the end. None gives None.

    Raises:
        OptionError: it cannot be written.
    """
    if path is None:
        yield None
        return
    target = path.resolve()  # a link stays one
    if not target.exists() and path.exists():  # a pipe of the shell's, which has no name of its own
        target = path
    try:
        aside = _made_aside(target)
    except OSError as error:
        raise OptionError(f"{option} {path} cannot be written: {_reason(target, error)}") from None
    try:
        yield OutputFile(option, path, target, aside)
    finally:
        if aside != target:
            with suppress(OSError):
                aside.unlink()


def check_apart(files: Mapping[str, Path | None]) -> None:
    """Refuse options that name one file twice: what is read would be lost, or one output of two.

    Args:
        files: by option. Those that are not given, or are standard input or output, are no files.

    Raises:
        OptionError: two name the same file.
    """
    named: dict[Path, str] = {}
    for option, path in files.items():
        if path is None or path == _DASH:
            continue
        if (other := named.setdefault(path.resolve(), option)) != option:
            raise OptionError(f"{other} and {option} name the same file, {path}: give each its own")


def _made_aside(target: Path) -> Path:
    """An empty file beside the target, or the target where it is a device or a pipe."""
    if target.is_dir():
        raise IsADirectoryError
    if target.exists() and not target.is_file():
        return target
    if target.exists() and not os.access(target, os.W_OK):
        raise PermissionError
    aside = target.with_name(f".{target.name}.{os.getpid()}.partial")
    aside.open("wb").close()
    if target.exists():
        aside.chmod(target.stat().st_mode)  # who may read it stays as it was
    return aside


def _reason(target: Path, error: OSError) -> str:
    if isinstance(error, IsADirectoryError):
        return "it is a folder"
    if isinstance(error, FileNotFoundError) and not target.parent.exists():
        return f"there is no folder {target.parent}"
    if isinstance(error, PermissionError):
        return "permission denied"
    return error.strerror or str(error)
