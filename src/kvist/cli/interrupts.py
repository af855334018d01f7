"""What Ctrl-C, SIGTERM and SIGHUP do, from the first moment of the process to its last."""

from __future__ import annotations

import atexit
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# The first signal has this long to clean up before another one interrupts it: people press Ctrl-C more than once, and
# a terminal that closes sends SIGHUP more than once.
_CLEANUP_S = 2.0


def take_signals() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt, and SIGTERM and SIGHUP raise SystemExit(128 + signal).

    So whatever ends the process, finally-blocks run: half-made files go away, and pip is ended. What the process was
    started to ignore (`nohup`) it ignores.
    """
    cleaning_until_s = 0.0

    def end(signum: int, frame: FrameType | None) -> None:
        nonlocal cleaning_until_s
        now_s = time.monotonic()
        if now_s < cleaning_until_s:
            return
        cleaning_until_s = now_s + _CLEANUP_S
        if signum == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + signum)

    for signum in _SIGNALS:
        if signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, end)


@contextmanager
def signals_wait() -> Iterator[None]:
    """Within, a signal is only noted; it takes effect at the end.

    For the import of PyTorch, which imports NumPy from C: there an exception is lost, or NumPy is left half loaded.
    """
    came: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        came.append(signum)

    handlers = {signum: signal.getsignal(signum) for signum in _SIGNALS}
    usual = {signum: handler for signum, handler in handlers.items() if callable(handler)}
    try:
        for signum in usual:
            signal.signal(signum, note)
        yield
    finally:
        for signum, handler in usual.items():
            signal.signal(signum, handler)
    for noted in came[:1]:
        usual[signal.Signals(noted)](noted, None)


def end_at_once() -> None:
    """From here on a signal ends the process without a word: nothing is left that would have to be cleaned up."""

    def leave(signum: int, frame: FrameType | None) -> None:
        os._exit(128 + signum)

    for signum in _SIGNALS:
        if callable(signal.getsignal(signum)):
            signal.signal(signum, leave)
    # Python takes its handlers away before it has ended: let Ctrl-C then leave the exit code as it is.
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
