"""vLLM on the CPU, weights and cache in bf16. It reads no GGUF: the weights are written out as bf16 once."""

from __future__ import annotations

import os
import time
from pathlib import Path

# It reads these when it is imported. In a process of its own the engine could not be stepped.
os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "3",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}

import torch
from protocol import Settings, Timed, serve
from transformers import AutoModelForCausalLM, GgufConfig
from vllm import LLM, SamplingParams


class VllmEngine:
    """Every call is a request of its own. What an earlier one computed of the same prompt is found again."""

    def __init__(self, settings: Settings) -> None:
        self._engine = LLM(
            str(_checkpoint(settings)),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=settings.max_context,
            max_num_seqs=64,
            enable_prefix_caching=True,
        ).llm_engine
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
        params = SamplingParams(max_tokens=draw, ignore_eos=True, temperature=0.0, detokenize=False)
        began_s = time.perf_counter()
        drawn: dict[str, list[int]] = {}
        for prompt in prompts:
            name = str(self._next_id)
            self._next_id += 1
            self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
            drawn[name] = []
        steps: int | None = None if after_first else draw
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                drawn[output.request_id] = list(output.outputs[0].token_ids)
            if steps is None and all(drawn.values()):
                began_s, steps = time.perf_counter(), draw - min(map(len, drawn.values()))
        seconds = time.perf_counter() - began_s
        if not steps:
            raise RuntimeError("the requests were through before all had begun")
        if after_first:
            seconds *= (draw - 1) / steps  # one that began earlier waited for the others with tokens of its own
        return Timed(seconds, next(iter(drawn.values())))


def _checkpoint(settings: Settings) -> Path:
    """The model as Hugging Face's libraries write it, made once."""
    model = Path(settings.model)
    folder = Path(settings.work_folder) / f"{model.stem}-bf16"
    if not (folder / "config.json").is_file():
        loaded = AutoModelForCausalLM.from_pretrained(
            model.parent,
            gguf_file=model.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
        )
        loaded.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    serve(VllmEngine)
