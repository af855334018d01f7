"""Letting signals wait while books are kept."""

from __future__ import annotations

import signal
import threading

# What `signal.signal` wraps in enums, which take ten times as long: a step enters several blocks.
from _signal import getsignal  # type: ignore[import-not-found]
from _signal import signal as set_handler
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# All that end a process and that a program may handle. SIGALRM is among them since the command line looks by it again
# at a signal that came in the midst of an import.
_SIGNALS = tuple(map(int, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)))


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let SIGINT, SIGTERM and SIGHUP wait until the block is through, and act on them then.

    Python raises an interrupt between any two instructions, so that whatever changes two things that must agree can
    be left between them. Blocks are short: a forward pass is none. Python's handlers run in the main thread; in others,
    and where a signal has no handler of Python's, there is nothing to do.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {signum: handler for signum in _SIGNALS if callable(handler := getsignal(signum))}
    waiting: dict[int, FrameType | None] = {}
    through = False

    def wait(signum: int, frame: FrameType | None) -> None:
        # An interrupt between two lines below may leave this in place: then it does what it stands for.
        if through:
            handlers[signum](signum, frame)
        else:
            waiting[signum] = frame

    try:
        for signum in handlers:
            set_handler(signum, wait)
        yield
    finally:
        through = True
        for signum, handler in handlers.items():
            set_handler(signum, handler)
        for signum, frame in waiting.items():
            handlers[signum](signum, frame)
