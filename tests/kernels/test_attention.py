"""The fused attention against its plain twin, and the twin against attention written out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from kvist.kernels import reference, sdpa


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


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
    """One query head and one query at a time."""
    num_queries, num_heads, _ = q.shape
    num_kv_heads, num_keys, _ = k.shape
    out = torch.empty_like(q)
    for t in range(num_queries):
        position = num_keys - num_queries + t
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(num_heads):
            kv_head = head // (num_heads // num_kv_heads)
            scores = [float(q[t, head] @ k[kv_head, j]) * scale for j in range(first, position + 1)]
            weights = [math.exp(score - max(scores)) for score in scores]
            mixed = sum(w * v[kv_head, first + j] for j, w in enumerate(weights))
            out[t, head] = mixed / sum(weights)
    return out


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_reference_is_attention_written_out(num_kv_heads: int, window: int | None) -> None:
    q, k, v = qkv(3, 7, 4, num_kv_heads, 8)
    expected = by_hand(q, k, v, 0.3, window)
    assert torch.allclose(reference.attention(q, k, v, scale=0.3, window=window), expected, atol=1e-5)


def test_neighbouring_query_heads_share_a_kv_head() -> None:
    """Repeating each KV head for its own neighbours gives the same; repeating the whole row of heads does not."""
    q, k, v = qkv(4, 9, 6, 2, 8)
    grouped = reference.attention(q, k, v, scale=0.3)
    neighbours = reference.attention(q, k.repeat_interleave(3, 0), v.repeat_interleave(3, 0), scale=0.3)
    whole_row = reference.attention(q, k.repeat(3, 1, 1), v.repeat(3, 1, 1), scale=0.3)
    assert torch.allclose(grouped, neighbours, atol=1e-6)
    assert (grouped - whole_row).abs().max() > 0.1


WINDOW = 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_keys", [1, WINDOW - 1, WINDOW, WINDOW + 1, 63, 64, 65])
@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(6, 6, 16), (9, 3, 64), (4, 1, 256), (4, 2, 80)])
def test_sdpa_matches_reference(
    num_heads: int, num_kv_heads: int, head_dim: int, window: int | None, num_keys: int, dtype: torch.dtype
) -> None:
    for num_queries in {1, num_keys, (num_keys + 1) // 2}:
        q, k, v = (x.to(dtype) for x in qkv(num_queries, num_keys, num_heads, num_kv_heads, head_dim))
        scale = head_dim**-0.5
        expected = reference.attention(q, k, v, scale=scale, window=window)
        tolerance = 2e-5 if dtype is torch.float32 else 2e-2
        assert torch.allclose(sdpa.attention(q, k, v, scale=scale, window=window), expected, atol=tolerance)


def test_sdpa_never_copies_keys_for_the_query_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """What reaches PyTorch's kernel are the cache's own bytes, shared over the group with stride 0."""
    seen: list[torch.Tensor] = []

    def spy(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: object) -> torch.Tensor:
        seen.extend((k, v))
        return q

    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", spy)
    q, k, v = qkv(2, 9, 6, 2, 8)
    sdpa.attention(q, k, v, scale=1.0)
    assert [x.data_ptr() for x in seen] == [k.data_ptr(), v.data_ptr()]
    assert all(x.stride(1) == 0 for x in seen)
