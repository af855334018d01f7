"""A model to generate text with."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, cast, overload

import torch

from kvist.attention import kernel_name
from kvist.cache.kv_cache import KVCache
from kvist.cache.plan import CachePlan
from kvist.checks import check_integer
from kvist.config import (
    WEIGHTS_FORMATS,
    CacheConfig,
    EngineConfig,
    SamplingParams,
    check_format,
    check_threads,
    checked_params,
)
from kvist.engine import DeltaStream, Engine, Request
from kvist.engine.prompt import Prompt, is_token_ids, prompt_ids
from kvist.engine.uninterrupted import uninterrupted
from kvist.errors import OptionError, PromptError, SameAnswerWarning
from kvist.kv_format import LayerFormats
from kvist.memory import MemoryBudget
from kvist.results import Completion, TextDelta, Timings, TokenLogprob
from kvist.session import Session

if TYPE_CHECKING:
    from kvist.loading import LoadedModel
    from kvist.loading.chat_template import Message
    from kvist.loading.progress import Progress

__all__ = ["LLM", "Completion", "Session", "TextDelta", "Timings", "TokenLogprob"]


class LLM:
    """A loaded model and its KV cache.

    Any number of threads may use it at once: their requests run in common steps. It is a context manager.

    Args:
        model: a directory in Hugging Face format, a `.gguf` file, a demo model's name or a Hub id.
        weights_format: how weights are kept, one of `kvist.config.WEIGHTS_FORMATS`; by default as a GGUF file holds
            them, `gguf`, and `bf16` for other models.
        kv_format: how keys and values are kept: one of `kvist.kv_format.KV_FORMATS`, one for each, `k=int8,v=int4`,
            and others for single layers, `int4/0-1,29:int8`.
        kv_memory: the most memory that all keys and values may take: bytes, as a number or like "512MiB", or a share of
            what is free once the model is loaded, 0.25 or "25%"; by default half of it.
        threads: how many threads PyTorch uses, in the whole process; by default as it is set.
        max_step_tokens: the most tokens computed in one step. Longer prompts are computed in chunks.
        progress: told how far loading is.

    Attributes:
        model_name: what the model goes by.
        config: its shape.
        tokenizer: its `kvist.loading.tokenizer.Tokenizer`.
        weights_format: one of `kvist.config.WEIGHTS_FORMATS`.
        weights_bytes: bytes of all weights.
        bf16_matrices: the matrices that stay in bf16 because `weights_format` does not fit them.
        kv_format: in the words of `kvist.kv_format.LayerFormats`.

    Raises:
        OptionError: an option cannot be honoured.
        ModelNotFoundError, ModelFileError, UnsupportedModelError, DownloadError: the model cannot be loaded.

    Warns:
        SameAnswerWarning: the weights, or this platform, do not keep the bits of a token's logits.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        weights_format: str | None = None,
        kv_format: str = "bf16",
        kv_memory: str | int | float | None = None,
        threads: int | None = None,
        max_step_tokens: int = EngineConfig.max_step_tokens,
        progress: Progress | None = None,
    ) -> None:
        # What can be refused is refused before the model is loaded.
        if weights_format is not None:
            check_format("weights_format", weights_format, WEIGHTS_FORMATS)
        formats, budget = LayerFormats.parse(kv_format), MemoryBudget.parse(kv_memory)
        engine_config = _engine_config(max_step_tokens)
        _set_threads(threads)

        from kvist.loading import load

        self._start(load(model, weights_format, progress=progress), formats, budget, engine_config, progress)

    @classmethod
    def from_loaded(
        cls,
        loaded: LoadedModel,
        *,
        kv_format: str = "bf16",
        kv_memory: str | int | float | None = None,
        threads: int | None = None,
        max_step_tokens: int = EngineConfig.max_step_tokens,
        progress: Progress | None = None,
    ) -> LLM:
        """An LLM of a model that is in memory already; the options are those of `LLM`."""
        formats, budget = LayerFormats.parse(kv_format), MemoryBudget.parse(kv_memory)
        engine_config = _engine_config(max_step_tokens)
        _set_threads(threads)
        llm = cls.__new__(cls)
        llm._start(loaded, formats, budget, engine_config, progress)
        return llm

    def _start(
        self,
        loaded: LoadedModel,
        formats: LayerFormats,
        budget: MemoryBudget,
        engine_config: EngineConfig,
        progress: Progress | None,
    ) -> None:
        self.model_name = loaded.name
        self.config = loaded.config
        self.tokenizer = loaded.tokenizer
        self.weights_format = loaded.weights_format
        self.weights_bytes = loaded.weights_bytes
        self.bf16_matrices = loaded.bf16_matrices
        self.kv_format = str(formats)
        if loaded.why_bits_differ is not None:
            warnings.warn(loaded.why_bits_differ, SameAnswerWarning, stacklevel=3)
        layers = loaded.config.layers
        cache_config = CacheConfig(formats, budget.resolve(), max_step_tokens=engine_config.max_step_tokens)
        # Statics may take minutes: what the cache would refuse is refused before.
        CachePlan.checked(layers, cache_config)
        statics = loaded.key_statics(progress) if formats.quantised_keys else None
        cache = KVCache(layers, cache_config, key_statics=statics)
        self._engine = Engine(
            loaded.decoder, loaded.config, cache, loaded.tokenizer.decode, loaded.eos_token_ids, engine_config
        )

    @property
    def kernel(self) -> str:
        """Which kernel attends over the cache."""
        return kernel_name(self._engine.cache.device)

    @property
    def max_context(self) -> int:
        """The most tokens of a sequence, prompt and generated text together."""
        return self.config.max_context

    @property
    def kv_memory_bytes(self) -> int:
        """The most bytes that all keys and values may take."""
        return self._engine.cache.config.memory_bytes

    @property
    def kv_used_bytes(self) -> int:
        """Bytes that running requests and open sessions hold now, room reserved for what they may generate included.

        Waits for the step that is running.
        """
        return self._engine.kv_used_bytes()

    @overload
    def generate(self, prompt: str, params: SamplingParams | None = None) -> Completion: ...

    @overload
    def generate(self, prompt: Sequence[int], params: SamplingParams | None = None) -> Completion: ...

    @overload
    def generate(
        self,
        prompt: list[str] | list[list[int]] | list[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]: ...

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Completion | list[Completion]:
        """Generate for one prompt, or for many together.

        Args:
            prompt: a text or its token ids, or a list of these.
            params: how to draw and when to stop; for a list of prompts one for all, or one for each.

        Returns:
            The completion; for a list of prompts the list of theirs, an empty one for an empty list.

        Raises:
            PromptError: a prompt is empty, too long for the context (`ContextFullError`), or holds unknown tokens.
            OptionError: a parameter cannot be honoured, or there are not as many as prompts.
            CacheFullError: a prompt and what it may generate do not fit into `kv_memory`.
            NumericsError: the model produced logits that are not numbers.
            StateError: the LLM is closed.
        """
        requested_at = time.perf_counter()
        if isinstance(prompt, str) or (is_token_ids(prompt) and prompt):
            return self._engine.run([self._request(cast(Prompt, prompt), checked_params(params), requested_at)])[0]
        if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray)):
            raise PromptError(
                f"a prompt is a text, a list of token ids or a list of these, not {type(prompt).__name__}"
            )
        requests = [
            self._request(cast(Prompt, one), one_params, requested_at)
            for one, one_params in zip(prompt, _one_each(params, len(prompt)), strict=True)
        ]
        return self._engine.run(requests)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> DeltaStream:
        """Generate for one prompt, and hand out the text while it comes.

        Closing or dropping the iterator gives the rest up. Raises what `generate` raises, for the prompt at once.
        """
        return self._stream(self._request(prompt, checked_params(params), time.perf_counter()))

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Completion:
        """Answer a conversation, written out by the model's chat template.

        Raises what `generate` raises, and `PromptError` where the model has no template.
        """
        return self._engine.run([self._chat_request(messages, params)])[0]

    def stream_chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> DeltaStream:
        """Answer a conversation, and hand out the text while it comes: `chat`, as `stream` does it."""
        return self._stream(self._chat_request(messages, params))

    def session(self, *, system: str | None = None) -> Session:
        """A conversation or text whose history stays in the cache.

        Args:
            system: a system message that every conversation of the session begins with.
        """
        return Session(self._engine, self.tokenizer, system=system)

    def close(self) -> None:
        """Give the cache's memory back. Running requests fail, and nothing can be generated any more."""
        self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _request(self, prompt: Prompt, params: SamplingParams, requested_at: float) -> Request:
        return Request(prompt_ids(prompt, self.tokenizer.encode), params, requested_at)

    def _chat_request(self, messages: Sequence[Message], params: SamplingParams | None) -> Request:
        requested_at = time.perf_counter()
        text = self.tokenizer.render_chat(messages)
        return Request(self.tokenizer.encode(text, add_special_tokens=False), checked_params(params), requested_at)

    def _stream(self, request: Request) -> DeltaStream:
        with uninterrupted():  # so that nothing is submitted that no stream gives up
            return DeltaStream(self._engine, self._engine.submit([request])[0])


def _engine_config(max_step_tokens: int) -> EngineConfig:
    check_integer("max_step_tokens", max_step_tokens, 1)
    return EngineConfig(max_step_tokens, min(EngineConfig.max_sequences, max_step_tokens))


def _set_threads(threads: int | None) -> None:
    if threads is not None:
        torch.set_num_threads(check_threads("threads", threads))


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [checked_params(params)] * num_prompts
    if not isinstance(params, Sequence):
        raise OptionError(f"params must be a SamplingParams or a list of them, not {type(params).__name__}")
    if len(params) != num_prompts:
        raise OptionError(
            f"there are {len(params)} params for {num_prompts} prompts: give one for all, or one for each"
        )
    return [checked_params(one) for one in params]
