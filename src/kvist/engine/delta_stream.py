"""The text of one request, piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType

from kvist.engine.engine import Engine
from kvist.engine.one_user import OneUser
from kvist.engine.sequence import Sequence
from kvist.errors import StateError
from kvist.results import TextDelta


class DeltaStream(Iterator[TextDelta]):
    """Iterates over a request's text while it is generated; the last piece carries the completion.

    A stream that is dropped, closed or interrupted gives its request up and the memory back. It is a context
    manager too.

    Args:
        engine: what runs the sequence.
        sequence: the request, submitted already.
        on_end: called once, when the text has ended or is given up, with the number of tokens that were handed out;
            other threads may have brought the sequence further. Not called where reading failed.
    """

    def __init__(
        self, engine: Engine, sequence: Sequence, on_end: Callable[[Sequence, int], None] | None = None
    ) -> None:
        self._over = False  # first: a stream that is interrupted here is dropped, and asks
        self._engine = engine
        self._sequence = sequence
        self._on_end = on_end
        self._num_tokens = 0
        self._ended_because: str | None = None
        self._one_reader = OneUser(
            "another thread is reading this stream: it has one reader, and is closed between two pieces"
        )

    def __next__(self) -> TextDelta:
        if self._ended_because is not None:
            raise StateError(self._ended_because)
        if self._over:
            raise StopIteration
        with self._one_reader:
            try:
                delta = self._engine.next_delta(self._sequence, self._num_tokens)
                self._num_tokens += len(delta.token_ids)
                if delta.completion is not None:
                    self._end()
                return delta
            except BaseException as error:
                self._end(failed=isinstance(error, Exception))  # an interrupt is no failure
                raise

    def close(self, because: str | None = None) -> None:
        """Give the rest up.

        Args:
            because: told to whoever reads on, as a `StateError`; without it the stream is at its end for them.

        Raises:
            StateError: another thread is reading.
        """
        with self._one_reader:
            if not self._over:
                self._ended_because = because
            self._end()

    def _end(self, *, failed: bool = False) -> None:
        if self._over:
            return
        self._over = True
        try:
            if self._on_end is not None and not failed:
                self._on_end(self._sequence, self._num_tokens)
        finally:
            self._engine.cancel(self._sequence)

    def __enter__(self) -> DeltaStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self._end()
