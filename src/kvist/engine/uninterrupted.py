"""Letting Ctrl-C wait while books are kept."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let SIGINT wait until the block is through, and act on it then.

    Python raises an interrupt between any two instructions, so that whatever changes two things that must agree can
    be left between them. Blocks are short: a forward pass is none. Python's handlers run in the main thread; in others,
    and where the signal has no handler of Python's, there is nothing to do.
    """
    handler = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
    if not callable(handler):
        yield
        return
    waiting: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda signum, frame: waiting.append((signum, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if waiting:
            handler(*waiting[-1])
