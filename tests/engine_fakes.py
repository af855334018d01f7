"""A model whose logits show every mistake in the cache, and a tokenizer of bytes."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch

from kvist.cache.kv_cache import CacheView
from kvist.cache.page_layout import PAGE_SLOTS
from kvist.cache.page_pool import page_stride
from kvist.cache.plan import CachePlan
from kvist.config import ModelConfig
from kvist.errors import PromptError
from kvist.kv_format import LayerFormats
from kvist.llm import LLM
from kvist.loading import LoadedModel
from kvist.loading.chat_template import Message
from kvist.models.step_inputs import StepInputs

SPECIAL = {"<bos>": 256, "<eos>": 257, "<user>": 258, "<model>": 259, "<system>": 260, "<end>": 261}
NAMES = {token_id: name for name, token_id in SPECIAL.items()}
VOCAB_SIZE = 262
END = SPECIAL["<end>"]


def tiny_config(max_context: int = 1024) -> ModelConfig:
    return ModelConfig(
        model_type="fake",
        vocab_size=VOCAB_SIZE,
        embed_dim=4,
        mlp_dim=4,
        num_heads=2,
        num_kv_heads=1,
        head_dim=2,
        max_context=max_context,
        rms_norm_eps=1e-6,
        tie_embeddings=True,
        windows=(None, None),
    )


BYTES_PER_TOKEN = CachePlan(tiny_config().layers, LayerFormats.parse("bf16"), 0, 1).bytes_per_token
PAGE_BYTES = page_stride(BYTES_PER_TOKEN * PAGE_SLOTS)


def memory_for(num_tokens: int) -> int:
    """The budget that so many tokens of one sequence fit into: a multiple of 64 of them."""
    assert num_tokens % PAGE_SLOTS == 0
    return num_tokens // PAGE_SLOTS * PAGE_BYTES


class HashingDecoder:
    """Logits are random numbers seeded by all keys and values of the sequence, read back from the cache.

    One key that is missing, stale, doubled or out of place makes them different altogether. Keys and values are small
    whole numbers, exact in bf16.
    """

    def __init__(self) -> None:
        self.steps: list[StepInputs] = []
        self.before_step: Callable[[StepInputs], None] = lambda inputs: None

    def __call__(self, inputs: StepInputs) -> torch.Tensor:
        self.before_step(inputs)
        self.steps.append(inputs)
        ids, positions = inputs.token_ids, inputs.positions
        k = torch.stack([ids // 16, ids % 16], dim=-1)[:, None]
        v = torch.stack([positions // 64, positions % 64], dim=-1)[:, None]
        for layer in range(2):
            inputs.cache.write(layer, (k + layer).float(), (v + layer).float())
        rows = inputs.logit_rows.tolist()
        return torch.stack([self._logits(inputs, row) for row in rows]) if rows else torch.empty(0, VOCAB_SIZE)

    def _readings(self, inputs: StepInputs, row: int) -> list[torch.Tensor]:
        """Keys and values `[1, L, 2]` of both layers, up to the row's token."""
        view = inputs.cache
        assert isinstance(view, CacheView)
        index = max(i for i, start in enumerate(view.row_starts) if start <= row)
        length = view.first_positions[index] + row - view.row_starts[index] + 1
        whole = -(-length // PAGE_SLOTS) * PAGE_SLOTS
        return [
            tensor[:, :length] for layer in range(2) for tensor in view.read_split(layer, index, start=0, stop=whole)
        ]

    def _logits(self, inputs: StepInputs, row: int) -> torch.Tensor:
        seed = 0
        for tensor in self._readings(inputs, row):
            seed = zlib.crc32(tensor.contiguous().numpy().tobytes(), seed)
        logits = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
        logits[32:127] += 3  # mostly text
        return logits


class AnsweringDecoder(HashingDecoder):
    """Wants the token that `answer` gives for all tokens so far, which it knows from the keys in the cache."""

    def __init__(self, answer: Callable[[list[int]], int]) -> None:
        super().__init__()
        self.answer = answer

    def _logits(self, inputs: StepInputs, row: int) -> torch.Tensor:
        keys = self._readings(inputs, row)[0].long()[0]
        logits = torch.zeros(VOCAB_SIZE)
        logits[self.answer((keys[:, 0] * 16 + keys[:, 1]).tolist())] = 9
        return logits


def scripted(script: Sequence[int], prompt_tokens: int) -> AnsweringDecoder:
    """Wants the tokens of a script one after another, whatever the prompt."""
    return AnsweringDecoder(lambda tokens: script[len(tokens) - prompt_tokens])


def echo(tokens: list[int]) -> int:
    """Answer a chat with what the user said last."""
    user = len(tokens) - 1 - tokens[::-1].index(SPECIAL["<user>"])
    end = tokens.index(END, user)
    answered = len(tokens) - tokens.index(SPECIAL["<model>"], end) - 1
    return [*tokens[user + 1 : end], END][answered]


class ByteTokenizer:
    """A token per byte of UTF-8, and special tokens that are written out in texts."""

    has_chat_template = True
    vocab_size = VOCAB_SIZE

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = [SPECIAL["<bos>"]] if add_special_tokens else []
        for part in re.split(f"({'|'.join(SPECIAL)})", text):
            ids += [SPECIAL[part]] if part in SPECIAL else part.encode()
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        parts = [
            bytes([i]) if i < 256 else b"" if skip_special_tokens else NAMES[i].encode() for i in ids if i < VOCAB_SIZE
        ]
        return b"".join(parts).decode(errors="replace")

    def render_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        if not self.has_chat_template:
            raise PromptError("this model has no chat template")
        tags = {"user": "<user>", "assistant": "<model>", "system": "<system>"}
        text = "<bos>" + "".join(f"{tags[message['role']]}{message['content']}<end>" for message in messages)
        return text + ("<model>" if add_generation_prompt else "")


@dataclass
class FakeLoaded:
    """What `kvist.loading.load` gives."""

    decoder: HashingDecoder = field(default_factory=HashingDecoder)
    config: ModelConfig = field(default_factory=tiny_config)
    tokenizer: ByteTokenizer = field(default_factory=ByteTokenizer)
    eos_token_ids: frozenset[int] = frozenset({SPECIAL["<eos>"], END})
    weights_format: str = "fp32"
    weights_bytes: int = 12
    bf16_matrices: tuple[str, ...] = ()
    why_bits_differ: str | None = None
    name: str = "fake"


def fake_llm(
    decoder: HashingDecoder | None = None,
    *,
    tokenizer: ByteTokenizer | None = None,
    max_context: int = 1024,
    kv_memory: int | str | None = "1MiB",
    threads: int | None = None,
    max_step_tokens: int = 1024,
) -> LLM:
    loaded = FakeLoaded(
        decoder=decoder or HashingDecoder(),
        config=tiny_config(max_context),
        tokenizer=tokenizer or ByteTokenizer(),
    )
    return LLM.from_loaded(
        cast(LoadedModel, loaded), kv_memory=kv_memory, threads=threads, max_step_tokens=max_step_tokens
    )
