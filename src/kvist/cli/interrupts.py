"""What Ctrl-C, SIGTERM and SIGHUP do, from the first moment of the process to its last."""

from __future__ import annotations

import atexit
import os
import signal
import time
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# The first signal has this long to clean up before another one interrupts it: people press Ctrl-C more than once, and
# a terminal that closes sends SIGHUP more than once.
_CLEANUP_S = 2.0
_LOOK_AGAIN_S = 0.02


def take_signals() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt, and SIGTERM and SIGHUP raise SystemExit(128 + signal).

    So whatever ends the process, finally-blocks run: half-made files go away, and pip is ended. What the process was
    started to ignore (`nohup`) it ignores.

    An import is finished first. Libraries lose an exception that comes in the midst of theirs, take it for another or
    abort: PyTorch imports NumPy from C++.
    """
    cleaning_until_s = 0.0
    waiting = signal.SIGINT

    def end(signum: int, frame: FrameType | None) -> None:
        nonlocal cleaning_until_s, waiting
        now_s = time.monotonic()
        if now_s < cleaning_until_s:
            return
        if _is_importing(frame):
            waiting = signal.Signals(signum)
            signal.setitimer(signal.ITIMER_REAL, _LOOK_AGAIN_S)
            return
        cleaning_until_s = now_s + _CLEANUP_S
        if signum == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + signum)

    signal.signal(signal.SIGALRM, lambda _, frame: end(waiting, frame))
    for signum in _SIGNALS:
        if signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, end)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def end_at_once() -> None:
    """From here on a signal ends the process without a word: nothing is left that would have to be cleaned up."""

    def leave(signum: int, frame: FrameType | None) -> None:
        os._exit(128 + signum)

    signal.setitimer(signal.ITIMER_REAL, 0)
    for signum in _SIGNALS:
        if callable(signal.getsignal(signum)):
            signal.signal(signum, leave)
    # Python takes its handlers away before it has ended: let Ctrl-C then leave the exit code as it is.
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
