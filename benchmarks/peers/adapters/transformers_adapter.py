"""Hugging Face transformers, weights and cache in bf16; a GGUF's weights become bf16 as it is read."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import torch
from protocol import Settings, Timed, serve
from transformers import AutoModelForCausalLM, DynamicCache, GgufConfig


class TransformersEngine:
    """The growing cache that `generate` makes by default. Decoding works on a copy of it, made before the clock starts.

    Prompts of a batch are padded on the left, as its users do it.
    """

    def __init__(self, settings: Settings) -> None:
        torch.set_num_threads(settings.threads)
        torch.set_grad_enabled(False)
        path = Path(settings.model)
        # Left in the file's blocks, they would be unpacked for every product, in float32.
        model = AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
        )
        self._model: Any = model  # `from_pretrained` gives it in evaluation mode
        self.reset()
        self.fill([])

    def reset(self) -> None:
        self._cache = DynamicCache(config=self._model.config)
        self._drawn = torch.zeros(1, 1, dtype=torch.long)

    def extend(self, token_ids: list[int]) -> Timed:
        began_s = time.perf_counter()
        self._drawn = self._step(torch.tensor([token_ids]), self._cache)
        return Timed(time.perf_counter() - began_s, self._drawn[0].tolist())

    def decode(self, num_tokens: int) -> Timed:
        return self._decode(self._drawn, self._cache, num_tokens)

    def fill(self, prompts: list[list[int]]) -> Timed:
        self._batch_cache = DynamicCache(config=self._model.config)
        self._batch_drawn = torch.zeros(len(prompts), 1, dtype=torch.long)
        if not prompts:
            return Timed(0.0, [])
        if len(set(map(len, prompts))) > 1:
            raise ValueError("a batch that decodes together has prompts of one length")
        began_s = time.perf_counter()
        self._batch_drawn = self._step(torch.tensor(prompts), self._batch_cache)
        return Timed(time.perf_counter() - began_s, self._batch_drawn[0].tolist())

    def decode_batch(self, num_tokens: int) -> Timed:
        return self._decode(self._batch_drawn, self._batch_cache, num_tokens)

    def answer(self, prompts: list[list[int]], num_tokens: int) -> Timed:
        longest = max(map(len, prompts))
        began_s = time.perf_counter()
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        drawn = self._model.generate(
            ids, attention_mask=mask, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False
        )
        return Timed(time.perf_counter() - began_s, drawn[0, longest:].tolist())

    def _step(self, ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """`[B, L]` tokens to the `[B, 1]` that follow them."""
        logits: torch.Tensor = self._model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1].argmax(-1, keepdim=True)

    def _decode(self, tokens: torch.Tensor, kept: DynamicCache, num_tokens: int) -> Timed:
        cache, first = copy.deepcopy(kept), [int(tokens[0])]
        began_s = time.perf_counter()
        for _ in range(num_tokens):
            tokens = self._step(tokens, cache)
            first.append(int(tokens[0]))
        return Timed(time.perf_counter() - began_s, first)


if __name__ == "__main__":
    serve(TransformersEngine)
