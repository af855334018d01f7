"""What sharing keys and values saves: the same decoder with fewer and fewer KV heads, token by token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from kvist.attention import DecoderConfig
from kvist.attention.grouped_query import default_head_dim
from kvist.attention.heads import check_head_counts
from kvist.checks import check_integer
from kvist.errors import OptionError

VOCAB_SIZE = 1024
UNCACHED_LENGTHS, UNCACHED_REPETITIONS = 16, 3
"""Without a cache a token takes so long that a few lengths are timed, a few times each, and not all of them."""

_ROUND_MLP_TO = 64

# Sharing pays where a token takes so much less than with the most KV heads.
_PAYS = 0.95


@dataclass(frozen=True)
class HeadsShape:
    """What is generated, and by what.

    Args:
        embed_dim: `E`.
        num_heads: `H`, query heads.
        kv_heads: the numbers of KV heads to measure, each a divisor of `H`.
        layers: how many.
        prompt: tokens that are there first.
        new_tokens: that follow.
        batch: rows at once.

    Raises:
        OptionError: a number is out of range or does not divide.
    """

    embed_dim: int
    num_heads: int
    kv_heads: tuple[int, ...]
    layers: int
    prompt: int
    new_tokens: int
    batch: int = 1

    def __post_init__(self) -> None:
        for name in ("embed_dim", "num_heads", "layers", "prompt", "batch"):
            check_integer(name, getattr(self, name), 1)
        check_integer("new_tokens", self.new_tokens, 2, note=", since the first comes with the prompt")
        for num_kv_heads in self.kv_heads:
            check_head_counts(self.num_heads, num_kv_heads)
        if default_head_dim(self.embed_dim, self.num_heads) % 2:
            raise OptionError(f"heads of {self.head_dim} dims cannot be turned by rope: their number must be even")

    @property
    def head_dim(self) -> int:
        return self.embed_dim // self.num_heads

    @property
    def length(self) -> int:
        """Tokens of a row in the end: the last was written and not read, so it is not in the cache."""
        return self.prompt + self.new_tokens - 1

    @property
    def counted_length(self) -> int:
        """The length at which a cache's scalars are counted: a round number where `new_tokens` is one."""
        return self.new_tokens if self.prompt < self.new_tokens else self.length

    @property
    def uncached_lengths(self) -> tuple[int, ...]:
        """Those at which a step without a cache is timed, evenly from the prompt to the last."""
        steps = min(UNCACHED_LENGTHS, self.new_tokens) - 1
        return tuple(self.prompt + (self.new_tokens - 1) * step // steps for step in range(steps + 1))

    def cache_scalars(self, num_kv_heads: int, length: int) -> int:
        """Of keys and values of one layer, as they are counted."""
        return 2 * self.batch * length * num_kv_heads * self.head_dim

    def config(self, num_kv_heads: int) -> DecoderConfig:
        """A gated MLP of `8 / 3 * E` has as many weights as a plain one of `4 * E`."""
        return DecoderConfig(
            vocab_size=VOCAB_SIZE,
            embed_dim=self.embed_dim,
            num_layers=self.layers,
            num_heads=self.num_heads,
            num_kv_heads=num_kv_heads,
            mlp_dim=math.ceil(8 * self.embed_dim / 3 / _ROUND_MLP_TO) * _ROUND_MLP_TO,
        )


@dataclass(frozen=True)
class Uncached:
    """A decoder that computes everything from the beginning for each token.

    Attributes:
        lengths: of texts for which the next token was timed.
        ms_per_token: of each, the median of its repetitions.
        repetitions: of each.
        generated_lengths: how many lengths a generation goes through; the others lie on lines between those timed.
    """

    lengths: tuple[int, ...]
    ms_per_token: tuple[float, ...]
    repetitions: int
    generated_lengths: int

    @property
    def total_seconds(self) -> tuple[float, ...]:
        """Of the new tokens up to each length, by the trapezoid rule: between two a token takes what a line says."""
        steps = zip(self.lengths, self.lengths[1:], self.ms_per_token, self.ms_per_token[1:], strict=False)
        return tuple(accumulate(((b - a) * (x + y) / 2 / 1e3 for a, b, x, y in steps), initial=0.0))


@dataclass(frozen=True)
class HeadsRow:
    """What one number of KV heads came to.

    Attributes:
        num_kv_heads: how many.
        kind: MHA, GQA or MQA.
        weights_bytes: of the decoder.
        prefill_ms: of the prompt.
        lengths: tokens in the cache at the end of each turn.
        ms_per_token: the median of each turn.
        new_tokens: of each turn.
        cache_tokens: the length at which the scalars of one layer's cache are
        counted_scalars: by the formula, and
        measured_scalars: of its tensors.
        cache_bytes: of all layers, at the end of each turn, as measured.
        process_bytes: by which the process's memory has grown in this decoder's turns, at the end of each.
        cuda_bytes: the same of `torch.cuda.memory_allocated`; None on other devices.
        uncached: without a cache; None where that was not asked for.
    """

    num_kv_heads: int
    kind: str
    weights_bytes: int
    prefill_ms: float
    lengths: tuple[int, ...]
    ms_per_token: tuple[float, ...]
    new_tokens: tuple[int, ...]
    cache_tokens: int
    counted_scalars: int
    measured_scalars: int
    cache_bytes: tuple[int, ...]
    process_bytes: tuple[int, ...]
    cuda_bytes: tuple[int, ...] | None
    uncached: Uncached | None

    @property
    def total_seconds(self) -> tuple[float, ...]:
        """Of the new tokens up to the end of each turn, without the prompt."""
        return tuple(accumulate(ms * n / 1e3 for ms, n in zip(self.ms_per_token, self.new_tokens, strict=True)))

    @property
    def tokens_per_s(self) -> float:
        """Of one row, over all new tokens."""
        return sum(self.new_tokens) / self.total_seconds[-1]


def pays_from(row: HeadsRow, baseline: HeadsRow) -> int | None:
    """The length from which on a token takes 5 % less than with the baseline, or better; None if there is none."""
    first = None
    for length, ms, other_ms in zip(row.lengths, row.ms_per_token, baseline.ms_per_token, strict=True):
        if ms > _PAYS * other_ms:
            first = None
        elif first is None:
            first = length
    return first


def growth(lengths: Sequence[int], total_seconds: Sequence[float]) -> float | None:
    """The power of the length with which the total time grows, over the second half: 1 is linear, 2 quadratic.

    None where there are too few lengths to tell.
    """
    half = len(lengths) // 2
    if half < 1 or lengths[half - 1] == lengths[-1] or not 0 < total_seconds[half - 1] < total_seconds[-1]:
        return None
    return math.log(total_seconds[-1] / total_seconds[half - 1]) / math.log(lengths[-1] / lengths[half - 1])
