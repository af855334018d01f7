"""What the tests of the modules over padded tensors share: a plain oracle, and random modules and inputs."""

from __future__ import annotations

import math

import torch

from kvist.attention import GroupedQueryAttention
from kvist.attention.rope import apply_rope, inverse_frequencies, rope_tables
from kvist.config import RopeConfig

ROPE = RopeConfig(100.0)


def module(num_heads: int, num_kv_heads: int, *, head_dim: int = 8, seed: int = 0, **options: object):
    """A random module of `embed_dim` 24, in evaluation."""
    torch.manual_seed(seed)
    return GroupedQueryAttention(24, num_heads, num_kv_heads, head_dim, **options).eval()  # type: ignore[arg-type]


def inputs(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(batch, length, 24, generator=torch.Generator().manual_seed(seed))


def expanded(attention: GroupedQueryAttention, x: torch.Tensor, *, whole_row: bool = False) -> torch.Tensor:
    """Causal attention of one row `[L, E]` in float64 over keys and values repeated to all heads, one head at a time.

    Neighbours share a KV head: 0 0 1 1. With `whole_row` they are repeated in the other order: 0 1 0 1.
    """
    x = x.double()
    weights = {name: weight.double() for name, weight in attention.state_dict().items()}

    def project(name: str, heads: int) -> torch.Tensor:
        y = torch.nn.functional.linear(x, weights[f"{name}_proj.weight"], weights.get(f"{name}_proj.bias"))
        return y.view(len(x), heads, attention.head_dim)

    q, k, v = (project(name, attention.num_heads if name == "q" else attention.num_kv_heads) for name in "qkv")
    if attention.rope is not None:
        frequencies = inverse_frequencies(attention.rope, attention.head_dim)
        tables = rope_tables(frequencies, torch.arange(len(x)), torch.float64)
        q, k = apply_rope(q, tables), apply_rope(k, tables)
    group_size = attention.num_heads // attention.num_kv_heads
    if whole_row:
        k, v = k.repeat(1, group_size, 1), v.repeat(1, group_size, 1)
    else:
        k, v = k.repeat_interleave(group_size, dim=1), v.repeat_interleave(group_size, dim=1)
    rows = []
    for i in range(len(x)):
        heads = []
        for head in range(attention.num_heads):
            scores = k[: i + 1, head] @ q[i, head] / math.sqrt(attention.head_dim)
            heads.append(scores.softmax(0) @ v[: i + 1, head])
        rows.append(torch.cat(heads))
    y = torch.stack(rows)
    return torch.nn.functional.linear(y, weights["o_proj.weight"], weights.get("o_proj.bias")).float()


def close(given: torch.Tensor, expected: torch.Tensor) -> None:
    """The same within rounding, and not because both are zero."""
    assert expected.abs().max() > 0.01
    torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-5)
