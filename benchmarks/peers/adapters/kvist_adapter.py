"""Kvist itself, by the engine under `kvist.LLM`: that one keeps sequences, and takes back what was drawn."""

from __future__ import annotations

import time
from collections.abc import Sequence

from protocol import Settings, Timed, serve

from kvist import LLM, SamplingParams
from kvist.engine import Request, Room

_KV_MEMORY = "4GiB"


class KvistEngine:
    """A request in a room goes on where its tokens and the room's part. So one over the same prompt decodes again."""

    def __init__(self, settings: Settings) -> None:
        llm = LLM(settings.model, kv_format=settings.cache, threads=settings.threads, kv_memory=_KV_MEMORY)
        self._engine = llm._engine
        self._prompt: list[int] = []
        self._room = self._engine.open_room()
        self._batch: list[tuple[list[int], Room]] = []

    def reset(self) -> None:
        self._engine.close_room(self._room)
        self._room, self._prompt = self._engine.open_room(), []

    def extend(self, token_ids: list[int]) -> Timed:
        # Tokens drawn before may be those that come now. They are computed again.
        self._room.token_ids = list(self._prompt)
        self._prompt += token_ids
        return self._run([(self._prompt, self._room)], 1, computed=len(token_ids))

    def decode(self, num_tokens: int) -> Timed:
        return self._run([(self._prompt, self._room)], num_tokens + 1, computed=1)

    def fill(self, prompts: list[list[int]]) -> Timed:
        for _, room in self._batch:
            self._engine.close_room(room)
        self._batch = [(prompt, self._engine.open_room()) for prompt in prompts]
        return self._run(self._batch, 1) if prompts else Timed(0.0, [])

    def decode_batch(self, num_tokens: int) -> Timed:
        return self._run(self._batch, num_tokens + 1, computed=1)

    def answer(self, prompts: list[list[int]], num_tokens: int) -> Timed:
        began_s = time.perf_counter()
        first, *_ = self._engine.run([Request(prompt, _greedy(num_tokens), began_s) for prompt in prompts])
        return Timed(time.perf_counter() - began_s, list(first.token_ids))

    def _run(self, batch: Sequence[tuple[list[int], Room]], draw: int, *, computed: int | None = None) -> Timed:
        """Time to the first token where one is drawn, else of those after it.

        Args:
            batch: prompts and their rooms.
            draw: tokens for each.
            computed: of each prompt, the tokens that the cache must not have had already.
        """
        params, began_s = _greedy(draw), time.perf_counter()
        completions = self._engine.run([Request(prompt, params, began_s, room) for prompt, room in batch])
        seconds = time.perf_counter() - began_s
        for completion in completions:
            if computed is not None and completion.prompt_tokens - completion.cached_tokens != computed:
                raise RuntimeError(f"{completion.cached_tokens} tokens were cached of {completion.prompt_tokens}")
        if draw > 1:
            rates = [completion.timings.decode_tokens_per_s or 0.0 for completion in completions]
            seconds = (draw - 1) / min(rates)
        return Timed(seconds, list(completions[0].token_ids))


def _greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True)


if __name__ == "__main__":
    serve(KvistEngine)
