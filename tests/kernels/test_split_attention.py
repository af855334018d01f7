"""The reference attention against attention written out by hand."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from kvist.kernels import split_attention
from kvist.kernels.split_attention import QUERY_TILE, SPLIT, ReadSplits


def qkv(
    num_queries: int, num_keys: int, num_heads: int, num_kv_heads: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_queries * 1000 + num_keys)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return (
        random(num_queries, num_heads, head_dim),
        random(num_kv_heads, num_keys, head_dim),
        random(num_kv_heads, num_keys, head_dim),
    )


def reader(k: torch.Tensor, v: torch.Tensor) -> ReadSplits:
    """Reads keys and values `[K, L, D]`, zeros beyond."""

    def read(start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert start % SPLIT == stop % SPLIT == 0
        assert start < k.shape[1] <= stop or stop <= k.shape[1], "a split beyond the end is read"
        placed = (x.new_zeros(len(x), stop - start, x.shape[2]) for x in (k, v))
        keys, values = (_fill(zeros, x[:, start:stop]) for zeros, x in zip(placed, (k, v), strict=True))
        return keys, values

    return read


def _fill(zeros: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    zeros[:, : x.shape[1]] = x
    return zeros


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> torch.Tensor:
    """Of the last queries of a text."""
    first = k.shape[1] - len(q)
    return split_attention.attention(q, reader(k, v), first, num_kv_heads=len(k), **options)  # type: ignore[arg-type]


def by_hand(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """One query head and one query at a time, in double precision."""
    q, k, v = q.double(), k.double(), v.double()
    out = torch.empty_like(q)
    for t, head in itertools.product(range(q.shape[0]), range(q.shape[1])):
        position, kv_head = k.shape[1] - len(q) + t, head // (q.shape[1] // len(k))
        seen = slice(0 if window is None else max(0, position - window + 1), position + 1)
        scores = k[kv_head, seen] @ q[t, head] * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        weights = scores.exp()
        total = weights.sum() + (0 if sinks is None else math.exp(sinks[head]))
        out[t, head] = weights @ v[kv_head, seen] / total
    return out.float()


WINDOW = 5
LENGTHS = [1, QUERY_TILE - 1, QUERY_TILE, QUERY_TILE + 1, WINDOW + 1, SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT + 3]
SHAPES = [(6, 6, 16), (9, 3, 64), (4, 1, 256), (4, 2, 80), (4, 4, 96), (8, 2, 128)]


@pytest.mark.parametrize("num_keys", LENGTHS)
@pytest.mark.parametrize("window", [None, 1, WINDOW, SPLIT])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_attention_written_out(shape: tuple[int, int, int], window: int | None, num_keys: int) -> None:
    for num_queries in {1, min(num_keys, 7)}:
        q, k, v = qkv(num_queries, num_keys, *shape)
        options = {"scale": shape[2] ** -0.5, "window": window}
        assert torch.allclose(attention(q, k, v, **options), by_hand(q, k, v, **options), atol=1e-5)  # type: ignore[arg-type]


@pytest.mark.parametrize("window", [None, 3])
def test_scores_are_capped_and_a_sink_takes_its_share(window: int | None) -> None:
    q, k, v = qkv(9, SPLIT + 5, 6, 2, 16)
    sinks = torch.linspace(-3, 6, 6)
    for options in ({"softcap": 2.0}, {"sinks": sinks}, {"softcap": 2.0, "sinks": sinks}):
        expected = by_hand(q, k, v, scale=0.5, window=window, **options)  # type: ignore[arg-type]
        assert torch.allclose(attention(q, k, v, scale=0.5, window=window, **options), expected, atol=1e-5)
        assert (expected - by_hand(q, k, v, scale=0.5, window=window)).abs().max() > 0.1


def test_neighbouring_query_heads_share_a_kv_head() -> None:
    """Repeating each KV head for its own neighbours gives the same; repeating the whole row of heads does not."""
    q, k, v = qkv(4, 9, 6, 2, 8)
    grouped = attention(q, k, v, scale=0.3)
    neighbours = attention(q, k.repeat_interleave(3, 0), v.repeat_interleave(3, 0), scale=0.3)
    whole_row = attention(q, k.repeat(3, 1, 1), v.repeat(3, 1, 1), scale=0.3)
    assert torch.allclose(grouped, neighbours, atol=1e-6)
    assert (grouped - whole_row).abs().max() > 0.1


def test_keys_of_any_strides_give_the_same_bits() -> None:
    q, k, v = qkv(3, SPLIT, 4, 2, 64)
    expected = attention(q, k, v, scale=0.1)
    transposed = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]
    given = split_attention.attention(
        q, lambda start, stop: (transposed[0], transposed[1]), SPLIT - 3, num_kv_heads=2, scale=0.1
    )
    assert torch.equal(given, expected)


def test_a_query_whose_scores_are_huge_stays_finite() -> None:
    q, k, v = qkv(2, SPLIT + 1, 2, 1, 8)
    assert torch.allclose(attention(q * 1e18, k * 1e18, v, scale=1.0), by_hand_argmax(q, k, v), atol=1e-5)


def by_hand_argmax(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Where scores are that far apart, only the largest counts."""
    out = torch.empty_like(q)
    for t, head in itertools.product(range(len(q)), range(q.shape[1])):
        seen = k.shape[1] - len(q) + t + 1
        out[t, head] = v[0, (k[0, :seen] @ q[t, head]).argmax()]
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_result_has_the_dtype_of_the_queries(dtype: torch.dtype) -> None:
    q, k, v = qkv(2, 5, 2, 1, 8)
    mixed = attention(q.to(dtype), k, v, scale=1.0)
    assert mixed.dtype == dtype
    assert torch.allclose(mixed.float(), by_hand(q.to(dtype), k, v, scale=1.0), atol=1e-2)
