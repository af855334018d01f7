"""OpenVINO GenAI by its continuous batching: steps can be timed, and a prompt's blocks stay for the next request."""

from __future__ import annotations

import time

import numpy as np
import openvino
import openvino_genai
from protocol import Settings, Timed, serve

_CACHE_GB = 3
# A prompt is one step, as in its pipeline for one request; those of many requests are taken up to so many tokens.
_STEP_TOKENS = 8192
_MOST_SEQUENCES = 64


class OpenVinoEngine:
    """Every call is a request of its own. What an earlier one computed of the same prompt is found again."""

    def __init__(self, settings: Settings) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = True
        scheduler.cache_size = _CACHE_GB
        scheduler.max_num_batched_tokens = _STEP_TOKENS
        scheduler.max_num_seqs = _MOST_SEQUENCES
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            settings.model,
            scheduler,
            "CPU",
            {"KV_CACHE_PRECISION": settings.cache, "INFERENCE_NUM_THREADS": settings.threads},
        )
        self._next_id = 0
        self._prompt: list[int] = []
        self._batch: list[list[int]] = []

    def reset(self) -> None:
        self._prompt = []

    def extend(self, token_ids: list[int]) -> Timed:
        self._prompt = self._prompt + token_ids
        return self._run([self._prompt], 1)

    def decode(self, num_tokens: int) -> Timed:
        return self._run([self._prompt], num_tokens + 1, after_first=True)

    def fill(self, prompts: list[list[int]]) -> Timed:
        self._batch = prompts
        return self._run(prompts, 1) if prompts else Timed(0.0, [])

    def decode_batch(self, num_tokens: int) -> Timed:
        return self._run(self._batch, num_tokens + 1, after_first=True)

    def answer(self, prompts: list[list[int]], num_tokens: int) -> Timed:
        return self._run(prompts, num_tokens)

    def _run(self, prompts: list[list[int]], draw: int, *, after_first: bool = False) -> Timed:
        """Time until all have their tokens: from the call, or from when each has its first."""
        config = openvino_genai.GenerationConfig(max_new_tokens=draw, ignore_eos=True, do_sample=False)
        began_s = time.perf_counter()
        handles = []
        for prompt in prompts:
            tokens = openvino.Tensor(np.array([prompt], dtype=np.int64))
            handles.append(self._pipeline.add_request(self._next_id, tokens, config))
            self._next_id += 1
        drawn: list[list[int]] = [[] for _ in prompts]
        steps: int | None = None if after_first else draw
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            for handle, tokens in zip(handles, drawn, strict=True):
                while handle.can_read():
                    for output in handle.read().values():
                        tokens.extend(output.generated_ids)
            if steps is None and all(drawn):
                began_s, steps = time.perf_counter(), draw - min(map(len, drawn))
        seconds = time.perf_counter() - began_s
        if not steps:
            raise RuntimeError("the requests were through before all had begun")
        if after_first:
            seconds *= (draw - 1) / steps  # one that began earlier waited for the others with tokens of its own
        return Timed(seconds, drawn[0])


if __name__ == "__main__":
    serve(OpenVinoEngine)
