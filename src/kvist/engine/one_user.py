"""For what one thread at a time may use, and a second one is told rather than kept waiting."""

from __future__ import annotations

import threading
from types import TracebackType

from kvist.errors import StateError


class OneUser:
    """A context manager that one thread can be in.

    The same thread may enter again: then an interrupt (Ctrl-C) came while it was leaving, at which a lock would stay
    locked for ever.

    Args:
        busy: what another thread is told, as a `StateError`.
    """

    def __init__(self, busy: str) -> None:
        self._busy = busy
        self._user: dict[str, int] = {}  # one key at most, set and taken in one operation each

    def __enter__(self) -> None:
        thread = threading.get_ident()
        if self._user.setdefault("thread", thread) != thread:
            raise StateError(self._busy)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._user.pop("thread", None)
