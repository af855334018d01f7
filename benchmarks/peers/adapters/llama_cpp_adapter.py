"""llama.cpp by its C functions, as llama-cpp-python hands them on: between two tokens Python only takes the argmax."""

from __future__ import annotations

import os
import time

import llama_cpp
import numpy as np
from protocol import Settings, Timed, serve

# What `llama-cli` and `llama-server` take by default.
_STEP_TOKENS, _COMPUTED_AT_ONCE = 2048, 512
_TYPES = {"f16": llama_cpp.GGML_TYPE_F16, "q8_0": llama_cpp.GGML_TYPE_Q8_0, "q4_0": llama_cpp.GGML_TYPE_Q4_0}


class _Context:
    """A cache for some sequences, and steps over it."""

    def __init__(self, model: llama_cpp.llama_model_p, settings: Settings, sequences: int) -> None:
        kind, _, plain = settings.cache.partition(", ")
        params = llama_cpp.llama_context_default_params()
        # Each sequence has a part of its own, in whole blocks of 256.
        params.n_ctx = sequences * -(-settings.max_context // 256) * 256
        params.n_seq_max = sequences
        params.kv_unified = False
        params.n_batch, params.n_ubatch = _STEP_TOKENS, _COMPUTED_AT_ONCE
        params.n_threads = params.n_threads_batch = settings.threads
        params.type_k = params.type_v = _TYPES[kind]
        params.flash_attn_type = (
            llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED if plain else llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        )
        params.swa_full = False  # a window's cache holds the window, as Kvist's does
        context = llama_cpp.llama_init_from_model(model, params)
        if not context:
            raise RuntimeError(f"llama.cpp makes no context of {params.n_ctx} tokens in {settings.cache}: see its log")
        self._context = context
        self._memory = llama_cpp.llama_get_memory(context)
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._batch = llama_cpp.llama_batch_init(_STEP_TOKENS, 0, 1)
        self.lengths = [0] * sequences

    def free(self) -> None:
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(self._memory, True)
        self.lengths = [0] * len(self.lengths)

    def compute(self, prompts: list[list[int]]) -> list[int]:
        """Add tokens to each sequence, packed into full steps; the most likely token after each."""
        drawn = [0] * len(prompts)
        batch, count = self._batch, 0
        ends: list[tuple[int, int]] = []
        for index, prompt in enumerate(prompts):
            for position, token in enumerate(prompt, self.lengths[index]):
                batch.token[count], batch.pos[count] = token, position
                batch.n_seq_id[count], batch.seq_id[count][0] = 1, index
                batch.logits[count] = False
                count += 1
                if count == _STEP_TOKENS and position + 1 < self.lengths[index] + len(prompt):
                    self._step(count, ends, drawn)
                    count, ends = 0, []
            self.lengths[index] += len(prompt)
            batch.logits[count - 1] = True
            ends.append((index, count - 1))
            if count == _STEP_TOKENS:
                self._step(count, ends, drawn)
                count, ends = 0, []
        if count:
            self._step(count, ends, drawn)
        return drawn

    def rewind(self, lengths: list[int]) -> None:
        for index, length in enumerate(lengths):
            if not llama_cpp.llama_memory_seq_rm(self._memory, index, length, -1):
                raise RuntimeError("llama.cpp cannot take back what was drawn")
        self.lengths = list(lengths)

    def decode(self, drawn: list[int], num_tokens: int) -> Timed:
        """Draw after what was drawn, and take it back."""
        lengths, first, tokens = list(self.lengths), [drawn[0]], drawn
        began_s = time.perf_counter()
        for _ in range(num_tokens):
            tokens = self.compute([[token] for token in tokens])
            first.append(tokens[0])
        seconds = time.perf_counter() - began_s
        self.rewind(lengths)
        return Timed(seconds, first)

    def _step(self, count: int, ends: list[tuple[int, int]], drawn: list[int]) -> None:
        self._batch.n_tokens = count
        status = llama_cpp.llama_decode(self._context, self._batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        for index, row in ends:
            logits = llama_cpp.llama_get_logits_ith(self._context, row)
            drawn[index] = int(np.ctypeslib.as_array(logits, (self._vocab,)).argmax())


class LlamaCppEngine:
    """A context for one sequence, and another for as many as a batch has."""

    def __init__(self, settings: Settings) -> None:
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_load_from_file(
            os.fsencode(settings.model), llama_cpp.llama_model_default_params()
        )
        if not model:
            raise RuntimeError("llama.cpp does not load the model: see its log")
        self._model, self._settings = model, settings
        self._single = _Context(model, settings, 1)
        self._drawn: list[int] = []
        self._batch: _Context | None = None
        self._batch_drawn: list[int] = []

    def reset(self) -> None:
        self._single.clear()

    def extend(self, token_ids: list[int]) -> Timed:
        began_s = time.perf_counter()
        self._drawn = self._single.compute([token_ids])
        return Timed(time.perf_counter() - began_s, self._drawn)

    def decode(self, num_tokens: int) -> Timed:
        return self._single.decode(self._drawn, num_tokens)

    def fill(self, prompts: list[list[int]]) -> Timed:
        if self._batch is not None:
            self._batch.free()
            self._batch = None
        if not prompts:
            return Timed(0.0, [])
        longest = max(map(len, prompts)) + 128  # with room for what is drawn
        room = Settings(**{**vars(self._settings), "max_context": longest})
        self._batch = _Context(self._model, room, len(prompts))
        began_s = time.perf_counter()
        self._batch_drawn = self._batch.compute(prompts)
        return Timed(time.perf_counter() - began_s, self._batch_drawn[:1])

    def decode_batch(self, num_tokens: int) -> Timed:
        if self._batch is None:
            raise RuntimeError("no batch was begun")
        return self._batch.decode(self._batch_drawn, num_tokens)

    def answer(self, prompts: list[list[int]], num_tokens: int) -> Timed:
        filled = self.fill(prompts)
        decoded = self.decode_batch(num_tokens - 1)
        self.fill([])
        return Timed(filled.seconds + decoded.seconds, decoded.token_ids)


if __name__ == "__main__":
    serve(LlamaCppEngine)
