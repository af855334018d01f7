"""A loaded model with a cache in one format, run by the engine as for any user."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvist.bench.probed import Measured
from kvist.bench.prompts import Prompts
from kvist.cache.kv_cache import KVCache
from kvist.cache.plan import CachePlan
from kvist.config import CacheConfig, EngineConfig, SamplingParams
from kvist.engine import Engine, Request, Room
from kvist.errors import CacheFullError, ContextFullError
from kvist.kernels.key_statics import KeyStatics
from kvist.kv_format import LayerFormats
from kvist.loading import LoadedModel
from kvist.memory import available_bytes, binary_size
from kvist.results import Completion


@dataclass(frozen=True)
class Workload:
    """The sequences that are run.

    Attributes:
        lengths: for each that is open at once, the most tokens of its prompt.
        new_tokens: that follow the first in every run.
        kept: whether they stay in the caches of all formats from one run to the next.
    """

    lengths: tuple[int, ...]
    new_tokens: int
    kept: bool

    @property
    def rewind_slack_tokens(self) -> int:
        """A run is rewound as a whole, so that the next one finds its prompt in the cache."""
        return max(CacheConfig.rewind_slack_tokens, self.new_tokens + 1)

    def plan(self, loaded: LoadedModel, kv_format: LayerFormats) -> CachePlan:
        return CachePlan(loaded.config.layers, kv_format, self.rewind_slack_tokens, EngineConfig.max_step_tokens)

    def kv_bytes(self, plan: CachePlan) -> int:
        """Bytes of all sequences at their longest."""
        return sum(plan.bytes_for(length + self.new_tokens + 1) for length in self.lengths)

    def check(self, loaded: LoadedModel, formats: Sequence[LayerFormats]) -> None:
        """Refuse what cannot be run, before it costs time.

        Raises:
            ContextFullError: a sequence is longer than the model's context.
            CacheFullError: the machine lacks the memory.
            OptionError: a format is not one for this model.
        """
        prompt, rest = max(self.lengths), self.new_tokens + 1
        if prompt + rest > loaded.config.max_context:
            raise ContextFullError(
                f"{prompt:,} tokens and {rest:,} that follow are {prompt + rest:,}, and the context of {loaded.name} "
                f"is {loaded.config.max_context:,}: take fewer tokens"
            )
        each = [self.kv_bytes(self.plan(loaded, kv_format)) for kv_format in formats]
        needed, free = sum(each) if self.kept else max(each), available_bytes()
        if needed > free:
            raise CacheFullError(
                f"sequences of {sum(self.lengths):,} tokens in all take {binary_size(needed)} in "
                f"{', '.join(map(str, formats))}, and {binary_size(free)} is free: take fewer, or fewer formats"
            )


class FormatRuns:
    """Sequences of real text in a cache of one format.

    Args:
        loaded: the model; formats share it.
        kv_format: how keys and values are kept.
        prompts: where the texts come from.
        workload: what is run, checked.
        key_statics: of each layer, where the format quantises keys.

    Attributes:
        kv_format, workload: as given.
        plan: what sequences cost in the cache.
        kv_bytes: of all sequences at their longest.
        engine: what runs them.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        kv_format: LayerFormats,
        prompts: Prompts,
        workload: Workload,
        key_statics: Sequence[KeyStatics] | None,
    ) -> None:
        self.kv_format, self.workload = kv_format, workload
        self.plan = workload.plan(loaded, kv_format)
        self.kv_bytes = workload.kv_bytes(self.plan)
        self._prompts = prompts
        # Those that decode together must all run; of requests that come at once some may wait, as for any user.
        together = len(workload.lengths) if workload.kept else 0
        config = EngineConfig(max_sequences=max(EngineConfig.max_sequences, together))
        cache = KVCache(
            loaded.config.layers,
            CacheConfig(kv_format, self.kv_bytes, workload.rewind_slack_tokens, config.max_step_tokens),
            key_statics=key_statics if kv_format.quantised_keys else None,
        )
        self.engine = Engine(
            loaded.decoder, loaded.config, cache, loaded.tokenizer.decode, loaded.eos_token_ids, config
        )
        self._rooms: list[Room] = []

    @property
    def new_tokens(self) -> int:
        return self.workload.new_tokens

    def decode(self, context: int, batch: int = 1) -> Measured:
        """Decode `new_tokens` of each of `batch` sequences together, each after a prompt of `context` tokens.

        What counts is the time from the first new token, which the prompt gives, to the last. The prompts stay in the
        cache: where the run before had the same ones or longer ones that begin so, none of them is computed again.
        """
        while len(self._rooms) < batch:
            self._rooms.append(self.engine.open_room())
        completions = self._run(
            [(self._prompts.of(context, index), self._rooms[index]) for index in range(batch)], self.new_tokens + 1
        )
        return Measured(max(_seconds_after_first(completion) for completion in completions))

    def prefill(self, context: int) -> Measured:
        """Compute a prompt of `context` tokens from nothing. What counts is the time to the first token."""
        (completion,) = self._run([(self._prompts.of(context), None)], 1)
        return Measured(completion.timings.ttft_ms / 1e3)

    def answer(self, lengths: Sequence[int]) -> Measured:
        """Requests with prompts of these lengths, all at once; `new_tokens` and the first one follow each.

        What counts is the time until all have ended.
        """
        asked: list[tuple[list[int], Room | None]] = [
            (self._prompts.of(length, index), None) for index, length in enumerate(lengths)
        ]
        began_s = time.perf_counter()
        self._run(asked, self.new_tokens + 1)
        return Measured(time.perf_counter() - began_s)

    def close(self) -> None:
        """Give the cache's memory back."""
        self.engine.close()

    def _run(self, asked: Sequence[tuple[list[int], Room | None]], max_tokens: int) -> list[Completion]:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        return self.engine.run([Request(ids, params, time.perf_counter(), room) for ids, room in asked])


def _seconds_after_first(completion: Completion) -> float:
    speed = completion.timings.decode_tokens_per_s
    if speed is None:
        raise ValueError("a run of one token has no time after the first")
    return (completion.completion_tokens - 1) / speed
