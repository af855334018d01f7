"""The standard streams: UTF-8 whatever the locale, and what becomes of those that are closed or full."""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def prepare_streams() -> None:
    """Make the streams of this process fit for text of any language. Call it once, before any of them is used.

    Standard input is read as UTF-8 and standard output written as UTF-8; a stream that is closed stays None. Standard
    error is always there: what it cannot take is lost, since an answer must not be lost for its statistics.
    """
    _occupy_closed_descriptors()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")
    sys.stderr = io.TextIOWrapper(
        io.BufferedWriter(_LossyFile(2, "w", closefd=False)),
        encoding="utf-8",
        errors="backslashreplace",
        line_buffering=True,
    )


class _LossyFile(io.FileIO):
    """A file that claims to have written what it could not: the disk is full, or the reader of the pipe has gone."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def _occupy_closed_descriptors() -> None:
    """Otherwise the next file that is opened would get the number of standard output, and what is written there."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if stream is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
            if descriptor > 2:
                os.close(descriptor)
