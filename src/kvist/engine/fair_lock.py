"""A lock that serves its waiters in the order in which they came."""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType

from kvist.engine.uninterrupted import uninterrupted


class FairLock:
    """Mutual exclusion, first come, first served.

    A thread that gives `threading.Lock` back and takes it at once again usually gets it, and one that drives step
    after step would starve the others. Here ownership passes to the one that waits longest.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()  # guards the two below, for a few instructions at a time
        self._owner: int | None = None  # of a thread
        self._waiters: deque[tuple[int, threading.Lock]] = deque()  # threads, each behind a gate of its own

    def acquire(self) -> None:
        """Wait until the lock is ours. It is not re-entrant."""
        thread, gate = threading.get_ident(), threading.Lock()
        gate.acquire()
        try:
            with uninterrupted(), self._mutex:
                # Ours already: an interrupt (Ctrl-C) came between taking it and using it.
                if self._owner is None or self._owner == thread:
                    self._owner = thread
                    return
                self._waiters.append((thread, gate))
            gate.acquire()  # opened by the owner before us, who has made us the owner
        except BaseException:
            with uninterrupted(), self._mutex:
                if (thread, gate) in self._waiters:
                    self._waiters.remove((thread, gate))
            if self._owner == thread:
                self.release()
            raise

    def try_acquire(self) -> bool:
        """Take the lock if that needs no waiting at all, so that it is safe in a finalizer too."""
        with uninterrupted():
            if not self._mutex.acquire(blocking=False):
                return False
            is_free = self._owner is None
            if is_free:
                self._owner = threading.get_ident()
            self._mutex.release()
            return is_free

    def release(self) -> None:
        """Hand the lock to the thread that waits longest."""
        with uninterrupted(), self._mutex:
            if self._waiters:
                self._owner, gate = self._waiters.popleft()
                gate.release()
            else:
                self._owner = None

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
