"""Which sequences run, and which of their tokens the next step computes."""

from __future__ import annotations

from kvist.cache.kv_cache import KVCache
from kvist.config import EngineConfig
from kvist.engine.sequence import Sequence
from kvist.engine.step_plan import Chunk, Refusal, StepPlan
from kvist.errors import CacheFullError
from kvist.memory import binary_size


class Scheduler:
    """First come, first served.

    A sequence starts when the cache has room for its prompt and all tokens it may generate, so that one that runs
    never lacks memory. Those after it wait for it, even where they would fit. One that cannot start although nothing
    runs is refused: what holds the memory are sessions, which may stay open for ever.
    """

    def __init__(self, cache: KVCache, config: EngineConfig) -> None:
        self._cache = cache
        self._config = config
        # In order of arrival, so those that run come first. One list: a step that is interrupted loses nobody.
        self._sequences: list[Sequence] = []

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """All that run or wait, in order of arrival."""
        return tuple(self._sequences)

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait for its start."""
        self._sequences.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended, or whose caller was interrupted before it was added."""
        if sequence in self._sequences:
            self._sequences.remove(sequence)

    def check_ever_fits(self, room_tokens: int, prompt_tokens: int) -> None:
        """Raise `CacheFullError` where not even the empty cache has room for a sequence."""
        cache = self._cache
        if cache.bytes_for(room_tokens) > cache.config.memory_bytes:
            raise CacheFullError(
                f"the request needs room for {self._size(room_tokens)}, {prompt_tokens:,} of the prompt and "
                f"{room_tokens - prompt_tokens:,} to generate, but the cache holds {self._size(cache.max_tokens)}: "
                "shorten the prompt, lower max_tokens or raise kv_memory"
            )

    def plan(self) -> StepPlan:
        """Start what fits, then share out the tokens of one step. Without chunks when nothing runs."""
        refusals = self._admit()
        single: list[Chunk] = []
        longer: list[Chunk] = []
        for sequence in self._sequences:
            if not sequence.started:
                continue
            try:
                chunk = self._pending(sequence)
            except Exception as error:  # its own, not that of the thread which happens to step
                refusals.append(Refusal(sequence, error))
                continue
            (single if chunk.num_tokens == 1 else longer).append(chunk)
        chunks: list[Chunk] = []
        budget = self._config.max_step_tokens
        for chunk in single + longer:
            if budget == 0:
                break
            fitting = (
                chunk if chunk.num_tokens <= budget else Chunk(chunk.sequence, chunk.start, chunk.start + budget, False)
            )
            chunks.append(fitting)
            budget -= fitting.num_tokens
        return StepPlan(tuple(chunks), tuple(refusals))

    def _admit(self) -> list[Refusal]:
        refusals: list[Refusal] = []
        running = 0
        for sequence in self._sequences:
            if sequence.started:
                running += 1
                continue
            if running == self._config.max_sequences:
                break
            try:
                started = self._start(sequence)
            except Exception as error:
                refusals.append(Refusal(sequence, error))
                continue
            if started:
                running += 1
            elif running:
                break
            else:
                refusals.append(Refusal(sequence, self._held_by_sessions(sequence)))
        return refusals

    def _start(self, sequence: Sequence) -> bool:
        """Reserve a sequence's room and keep what it holds already; False, and nothing changed, without memory."""
        room = sequence.room
        held = room.token_ids[: self._cache.length(room.sequence_id)]
        # The last token is always computed: its logits are wanted.
        shared = min(common_prefix(held, sequence.token_ids), sequence.prompt_tokens - 1)
        if not self._cache.reserve(room.sequence_id, sequence.room_tokens, rewind_to=shared):
            return False
        room.token_ids = sequence.token_ids
        sequence.start(cached_tokens=self._cache.length(room.sequence_id))
        return True

    def _pending(self, sequence: Sequence) -> Chunk:
        sequence_id, stop = sequence.room.sequence_id, len(sequence.token_ids)
        if self._cache.length(sequence_id) == stop:
            # A step was interrupted between its commit and its new token: the last one is computed again.
            self._cache.rewind(sequence_id, stop - 1)
        return Chunk(sequence, self._cache.length(sequence_id), stop, True)

    def _held_by_sessions(self, sequence: Sequence) -> CacheFullError:
        cache = self._cache
        held = cache.used_bytes - cache.sequence_bytes(sequence.room.sequence_id)
        left = cache.config.memory_bytes - held
        return CacheFullError(
            f"the request needs room for {self._size(sequence.room_tokens)}, but open sessions hold "
            f"{binary_size(held)} of the cache and leave {binary_size(left)}: close or reset a session, shorten the "
            "prompt, lower max_tokens or raise kv_memory"
        )

    def _size(self, num_tokens: int) -> str:
        return f"{num_tokens:,} tokens ({binary_size(self._cache.bytes_for(num_tokens))})"


def common_prefix(left: list[int], right: list[int]) -> int:
    """How many tokens two sequences share from the first on."""
    length = min(len(left), len(right))
    if left[:length] == right[:length]:
        return length
    return next(index for index in range(length) if left[index] != right[index])
