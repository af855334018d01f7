"""Attention over the cache by itself, on random values: what a format costs and gains in decode and in prefill."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvist.bench.probed import Measured
from kvist.cache.cache_view import CacheView
from kvist.cache.kv_cache import KVCache, Span
from kvist.cache.plan import CachePlan
from kvist.checks import check_integer
from kvist.config import CacheConfig, LayerConfig
from kvist.errors import CacheFullError, OptionError
from kvist.kernels import native
from kvist.kernels.key_statics import KeyStatics
from kvist.kv_format import LayerFormats
from kvist.memory import available_bytes

_MAX_STEP_TOKENS = 2048
# More than any model has.
_MOST = {"num_heads": 1 << 16, "num_kv_heads": 1 << 16, "layers": 10_000}
_ROPE_THETA = 10_000.0


@dataclass(frozen=True)
class AttentionShape:
    """What is computed.

    Args:
        num_heads: `H`, query heads.
        num_kv_heads: `K`, a divisor of `H`.
        head_dim: `D`.
        context: tokens of each sequence.
        batch: sequences.
        layers: each has memory of its own.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    context: int
    batch: int
    layers: int

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_dim", "context", "batch", "layers"):
            check_integer(name.removeprefix("num_"), getattr(self, name), 1, _MOST.get(name))
        if self.num_heads % self.num_kv_heads:
            raise OptionError(f"kv_heads is {self.num_kv_heads}: it must divide the {self.num_heads} query heads")

    @property
    def layer_configs(self) -> list[LayerConfig]:
        return [LayerConfig(self.num_kv_heads, self.head_dim, None)] * self.layers

    @property
    def prefill_flop(self) -> int:
        """Operations of the causal products of all sequences and layers, a multiplication and an addition each."""
        pairs = self.context * (self.context + 1) // 2
        return 2 * 2 * pairs * self.num_heads * self.head_dim * self.batch * self.layers


class FilledCache:
    """A cache in one format, with random keys and values of all sequences.

    Args:
        shape: what it holds.
        kv_format: how.
        shares: whether the sequences are forks of one, which share its pages.
        dtype: of the queries.

    Attributes:
        bytes_per_token: of keys and values, over all layers.
        mixed: what came of the last step, `[layers, T, H, D]`.

    Raises:
        CacheFullError: the machine lacks the memory.
    """

    def __init__(
        self,
        shape: AttentionShape,
        kv_format: LayerFormats,
        *,
        shares: bool = False,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self._shape = shape
        layers = shape.layer_configs
        plan = CachePlan(layers, kv_format, 0, _MAX_STEP_TOKENS)
        # The page that forks write to next is promised to each of them, beside the one that they share.
        needed = shape.batch * plan.bytes_for(shape.context + 1) + (plan.least_bytes if shares else 0)
        rows = max(min(_MAX_STEP_TOKENS, shape.context), shape.batch)
        # Queries, keys and values, with the float32 numbers of which they are made, and what comes of all layers.
        heads = (shape.num_heads + 2 * shape.num_kv_heads) * (torch.float32.itemsize + dtype.itemsize)
        heads += shape.layers * shape.num_heads * dtype.itemsize
        taken = needed + rows * heads * shape.head_dim
        if taken > available_bytes():
            raise CacheFullError(
                f"{shape.batch} sequences of {shape.context:,} tokens and their queries take {taken:,} bytes in "
                f"{kv_format}, and {available_bytes():,} are free: lower context, batch, layers or heads"
            )
        statics = [_statics(shape)] * shape.layers if kv_format.quantised_keys else None
        self._cache = KVCache(layers, CacheConfig(kv_format, needed, 0, _MAX_STEP_TOKENS), key_statics=statics)
        self.bytes_per_token = self._cache.bytes_per_token
        self._sequences = [self._cache.open() for _ in range(1 if shares else shape.batch)]
        self._reserve()
        generator = torch.Generator().manual_seed(0)
        self._q = _random(generator, rows, shape.num_heads, shape.head_dim).to(dtype)
        self._k, self._v = (_random(generator, rows, shape.num_kv_heads, shape.head_dim).to(dtype) for _ in range(2))
        for first in range(0, shape.context, _MAX_STEP_TOKENS):
            count = min(_MAX_STEP_TOKENS, shape.context - first)
            for sequence in self._sequences:
                self._cache.commit(self._appended([Span(sequence, count)]))
        while len(self._sequences) < shape.batch:
            self._sequences.append(self._cache.fork(self._sequences[0]))
        self._reserve()

    def _reserve(self) -> None:
        for sequence in self._sequences:
            if not self._cache.reserve(sequence, self._shape.context + 1):
                raise RuntimeError("the cache was measured for these sequences and does not take them")

    def _appended(self, spans: list[Span]) -> CacheView:
        """A step's view, with its keys and values in every layer: the same random ones, in memory of their own."""
        view = self._cache.view(spans)
        for layer in range(self._shape.layers):
            view.write(layer, self._k[: view.num_tokens], self._v[: view.num_tokens])
        return view

    def decode(self) -> Measured:
        """One token of each sequence attends, in every layer: the last one, which is appended again before."""
        for sequence in self._sequences:
            self._cache.rewind(sequence, self._shape.context - 1)
        return Measured(self._attend([Span(sequence, 1) for sequence in self._sequences]))

    def prefill(self) -> Measured:
        """Every token attends to those before it, in every layer, a step of one sequence after another."""
        seconds = 0.0
        for sequence in self._sequences:
            for first in range(0, self._shape.context, _MAX_STEP_TOKENS):
                self._cache.rewind(sequence, first)
                seconds += self._attend([Span(sequence, min(_MAX_STEP_TOKENS, self._shape.context - first))])
        return Measured(seconds)

    def _attend(self, spans: list[Span]) -> float:
        """The seconds of attention alone, of a step whose tokens are appended first: pages that were rewound hold none.

        It is called as a native decoder layer calls it: what a step prepares for all its layers is prepared, and no
        tensor passes through Python. A step's view is committed, so that the tokens count.
        """
        view = self._appended(spans)
        q = self._q[: view.num_tokens]
        self.mixed = torch.empty(self._shape.layers, *q.shape, dtype=q.dtype)
        calls = []
        for mixed, pages in zip(self.mixed, view.native_layers(), strict=True):
            if pages is None:
                raise RuntimeError("the cache was made on the CPU, and its pages are not there")
            calls.append((*pages, native.capsule(q), native.capsule(mixed)))
        scale, threads = self._shape.head_dim**-0.5, torch.get_num_threads()
        began_s = time.perf_counter()
        for step, of_layer, queries, out in calls:
            step.attend(of_layer, queries, out, scale=scale, num_threads=threads)
        seconds = time.perf_counter() - began_s
        self._cache.commit(view)
        return seconds


def torch_forms(shape: AttentionShape) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """PyTorch's own ways of the same decoding, over contiguous bf16 keys and values of every layer.

    Each gives what came of the last layer, `B * H * D` numbers in the same order.
    """
    generator = torch.Generator().manual_seed(0)
    batch, heads, kv_heads, dims = shape.batch, shape.num_heads, shape.num_kv_heads, shape.head_dim
    group = heads // kv_heads
    kept = [
        tuple(_random(generator, batch, kv_heads, shape.context, dims).bfloat16() for _ in range(2))
        for _ in range(shape.layers)
    ]
    q = _random(generator, batch, heads, 1, dims).bfloat16()
    grouped = q.view(batch, kv_heads, group, dims)
    scale = dims**-0.5

    def each(form: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            with torch.inference_mode():
                return [form(k, v) for k, v in kept][-1]

        return run

    yield "enable_gqa", each(lambda k, v: scaled_dot_product_attention(q, k, v, enable_gqa=True, scale=scale))
    yield "grouped queries", each(lambda k, v: scaled_dot_product_attention(grouped, k, v, scale=scale))
    yield (
        "product, softmax, product",
        each(lambda k, v: (grouped @ k.transpose(-1, -2) * scale).float().softmax(-1).bfloat16() @ v),
    )


def _statics(shape: AttentionShape) -> KeyStatics:
    """Statics like a model's: reading does the same whatever they are."""
    generator = torch.Generator().manual_seed(1)
    heads, dims = shape.num_kv_heads, shape.head_dim
    block = native.group_dims("int4", dims) if native.takes_head_dim("int4", dims) else 1
    return KeyStatics(
        offset=_random(generator, heads, dims),
        scale=_random(generator, heads, dims).mul_(0.2).exp_(),
        feedback=torch.eye(block).expand(heads, dims // block, block, block).contiguous(),
        frequencies=_ROPE_THETA ** -(torch.arange(0, dims, 2) / dims),
    )


def _random(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator)
