"""The loop from waiting requests to finished texts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from kvist.cache.kv_cache import KVCache
from kvist.config import EngineConfig, ModelConfig
from kvist.engine.fair_lock import FairLock
from kvist.engine.runner import step_inputs
from kvist.engine.sampler import Drawn, SamplingState, sample
from kvist.engine.scheduler import Scheduler
from kvist.engine.sequence import Request, Room, Sequence
from kvist.engine.text import Decode, GeneratedText
from kvist.engine.uninterrupted import uninterrupted
from kvist.errors import ContextFullError, KvistError, OptionError, PromptError, StateError
from kvist.models.step_inputs import StepInputs
from kvist.results import Completion, TextDelta


class Engine:
    """Runs the requests of any number of threads in common steps.

    It has no thread of its own: whoever waits for a sequence takes steps, and each step advances everybody's. All
    state is behind one lock, which a caller holds for one step at a time.

    Args:
        decoder: from `StepInputs` to logits `[S, V]` float32.
        config: the model's.
        cache: where its keys and values are kept.
        decode: from token ids to text, without special tokens.
        eos_token_ids: the model's own end tokens.
        engine_config: how much one step takes on.
    """

    def __init__(
        self,
        decoder: Callable[[StepInputs], torch.Tensor],
        config: ModelConfig,
        cache: KVCache,
        decode: Decode,
        eos_token_ids: Collection[int],
        engine_config: EngineConfig,
    ) -> None:
        self.config = config
        self.cache = cache
        self._decoder = decoder
        self._decode = decode
        self._eos_token_ids = frozenset(eos_token_ids)
        self._scheduler = Scheduler(cache, engine_config)
        self._session_rooms: set[Room] = set()
        self._closed = False
        self._lock = FairLock()
        # What must not wait for the lock, since a finalizer may ask for it: done by whoever holds the lock.
        self._chores: deque[Callable[[], None]] = deque()

    def step(self) -> None:
        """One forward pass over tokens of all running sequences. The caller holds the lock.

        An error ends the sequences concerned and is raised where they are waited for, not here.
        """
        with uninterrupted():
            plan = self._scheduler.plan()
            for refusal in plan.refusals:
                self._fail(refusal.sequence, refusal.error)
        if not plan.chunks:
            return
        try:
            with torch.inference_mode():
                with uninterrupted():
                    inputs = step_inputs(plan, self.cache)
                logits = self._decoder(inputs)
                with uninterrupted():
                    self.cache.commit(inputs.cache)
                outcomes = sample(logits, [sequence.sampling for sequence in plan.sampling])
        except Exception as error:
            with uninterrupted():
                for chunk in plan.chunks:
                    self._fail(chunk.sequence, error)
            return
        with uninterrupted():
            for sequence, outcome in zip(plan.sampling, outcomes, strict=True):
                self._take(sequence, outcome)

    def submit(self, requests: list[Request]) -> list[Sequence]:
        """Let requests wait for their start: all of them, or none where one cannot be run.

        Raises:
            PromptError: a prompt is empty, too long for the context (`ContextFullError`) or holds unknown tokens.
            StateError: the engine is closed.
            OptionError: a parameter names a token that the model does not have.
            CacheFullError: a request would not fit into the empty cache.
        """
        for number, request in enumerate(requests, 1):
            try:
                self._check(request)
            except KvistError as error:
                if len(requests) == 1:
                    raise
                raise type(error)(f"prompt {number} of {len(requests)}: {error}") from None
        sequences: list[Sequence] = []
        try:
            with self._exclusive(), uninterrupted():
                self._check_open()
                for request in requests:
                    sequences.append(self._sequence(request))
                    self._scheduler.add(sequences[-1])
        except BaseException:
            for sequence in sequences:
                self.cancel(sequence)
            raise
        return sequences

    def run(self, requests: list[Request]) -> list[Completion]:
        """Generate for all requests together; their completions in the same order.

        Raises what `submit` raises, or the error of a sequence that fails; the others are then given up.
        """
        sequences: list[Sequence] = []
        try:
            with uninterrupted():  # so that none is submitted that nobody gives up
                sequences += self.submit(requests)
            while True:
                with self._exclusive():
                    _raise_errors(sequences)
                    completions = [sequence.completion for sequence in sequences if sequence.completion is not None]
                    if len(completions) == len(sequences):
                        return completions
                    self.step()
        finally:
            for sequence in sequences:
                self.cancel(sequence)

    def next_delta(self, sequence: Sequence, num_tokens: int) -> TextDelta:
        """What follows the first `num_tokens` generated tokens of a sequence, as soon as there is anything."""
        while True:
            with self._exclusive():
                if not sequence.done and sequence.num_generated == num_tokens:
                    self.step()
                _raise_errors([sequence])
                if sequence.num_generated > num_tokens:
                    return sequence.delta_since(num_tokens)

    def cancel(self, sequence: Sequence) -> None:
        """Give a sequence up and its memory back, unless it has ended. Never waits: safe in a finalizer."""
        self._chores.append(partial(self._fail, sequence, StateError("this text was given up by its caller")))
        self._sweep()

    def open_room(self) -> Room:
        """A room for a session, which holds nothing yet."""
        with self._exclusive():
            self._check_open()
            with uninterrupted():
                room = Room(self.cache.open(), kept=True)
                self._session_rooms.add(room)
            return room

    def close_room(self, room: Room) -> None:
        """Give a session's memory back; its sequence must have ended or been cancelled. Never waits."""
        self._chores.append(partial(self._release_room, room))
        self._sweep()

    def kv_used_bytes(self) -> int:
        """Bytes of the pages that sequences have or may still take. Waits for the step that is running."""
        with self._exclusive():
            return self.cache.used_bytes

    def close(self) -> None:
        """Give up all sequences and all memory of the cache. The engine cannot be used after it."""
        with self._exclusive(), uninterrupted():
            self._closed = True
            for sequence in self._scheduler.sequences:
                self._fail(sequence, StateError("the LLM was closed while this text was generated"))
            for room in list(self._session_rooms):
                self._release_room(room)

    # --- behind the lock ----------------------------------------------------------------------------------------------

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        try:
            with self._lock:
                self._do_chores()
                try:
                    yield
                finally:
                    self._do_chores()
        finally:
            self._sweep()

    def _sweep(self) -> None:
        """Do the chores, unless somebody holds the lock, who does them before or after giving it back."""
        while self._chores and self._lock.try_acquire():
            try:
                self._do_chores()
            finally:
                self._lock.release()

    def _do_chores(self) -> None:
        if self._chores:
            with uninterrupted():
                while self._chores:
                    self._chores.popleft()()

    def _sequence(self, request: Request) -> Sequence:
        params = request.params
        eos_token_ids = frozenset() if params.ignore_eos else self._eos_token_ids
        return Sequence(
            request,
            max_new_tokens=self._max_new_tokens(request),
            end_token_ids=eos_token_ids.union(params.stop_token_ids),
            sampling=SamplingState(params, request.token_ids, self.config.vocab_size, self.cache.device),
            text=GeneratedText(self._decode, request.token_ids, params.stop),
            room=request.room or Room(self.cache.open(), kept=False),
        )

    def _take(self, sequence: Sequence, outcome: Drawn | Exception) -> None:
        if isinstance(outcome, Exception):
            self._fail(sequence, outcome)
            return
        try:
            finish_reason = sequence.take(outcome)
            if finish_reason is not None:
                sequence.complete(
                    finish_reason,
                    kv_bytes=self.cache.sequence_bytes(sequence.room.sequence_id),
                    kv_bytes_per_token=self.cache.bytes_per_token,
                )
        except Exception as error:
            self._fail(sequence, error)
            return
        if sequence.done:
            self._retire(sequence)

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        if not sequence.done:
            sequence.error = error
            self._retire(sequence)

    def _retire(self, sequence: Sequence) -> None:
        self._scheduler.remove(sequence)
        if sequence.room.kept:
            self.cache.unreserve(sequence.room.sequence_id)
        else:
            self.cache.release(sequence.room.sequence_id)

    def _release_room(self, room: Room) -> None:
        if room in self._session_rooms:
            self._session_rooms.remove(room)
            self.cache.release(room.sequence_id)

    # --- what can be run ----------------------------------------------------------------------------------------------

    def _max_new_tokens(self, request: Request) -> int:
        return min(request.params.max_tokens, self.config.max_context - len(request.token_ids))

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("this LLM is closed: load the model again")

    def _check(self, request: Request) -> None:
        token_ids, params, vocab_size = request.token_ids, request.params, self.config.vocab_size
        if not token_ids:
            raise PromptError("the prompt is empty: give some text, or at least one token")
        if len(token_ids) >= self.config.max_context:
            raise ContextFullError(
                f"the prompt has {len(token_ids):,} tokens, and the model's context of {self.config.max_context:,} "
                "must hold at least one more: shorten the prompt"
            )
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise PromptError(f"the prompt holds token {token_id}: the model knows 0 to {vocab_size - 1}")
        for option, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
            for token_id in ids:
                if not 0 <= token_id < vocab_size:
                    raise OptionError(f"{option} names token {token_id}: the model knows 0 to {vocab_size - 1}")
        self._scheduler.check_ever_fits(len(token_ids) + self._max_new_tokens(request), len(token_ids))


def _raise_errors(sequences: list[Sequence]) -> None:
    for sequence in sequences:
        if sequence.error is not None:
            raise sequence.error
