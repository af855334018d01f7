r"""Grouped-query attention, of which multi-head and multi-query attention are the two ends.

    MHA: num_kv_heads = num_heads      GQA: some share             MQA: num_kv_heads = 1

    Q  o o o o o o o o                 Q  o o o o o o o o          Q  o o o o o o o o
       | | | | | | | |                     \|  |/  \|  |/             \ \ \ \/ / / /
    KV o o o o o o o o                 KV   o      o               KV       o

Query head h reads KV head h // group_size: neighbours share. The cache holds KV heads only, so it shrinks by group_size
(arXiv 2305.13245, arXiv 1911.02150).
"""

from __future__ import annotations

import torch
from torch import nn

from kvist.attention.attend import attend
from kvist.attention.rope import apply_rope
from kvist.cache.cache_view import CacheView
from kvist.kernels.plain_linear import Linear


class GroupedQueryAttention(nn.Module):
    """The attention of a decoder layer: project, norm, rotate, write to the cache, attend over it, project back.

    Args:
        embed_dim: `E`.
        num_heads: `H`, query heads.
        num_kv_heads: `K`, a divisor of `H`.
        head_dim: `D`.
        qkv_bias: whether the projections to queries, keys and values add a bias.
        output_bias: whether the projection back does.
        scale: multiplies the scores.
        window: tokens that a query sees, itself included; None sees all. Attention goes by that of the cache's
            layer, which is the same; this is for who looks at the queries and keys by themselves.
        q_norm, k_norm: norms over the head dim of queries and keys, if any.
    """

    def __init__(
        self,
        *,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        qkv_bias: bool = False,
        output_bias: bool = False,
        window: int | None = None,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.scale = scale
        self.window = window
        self.q_proj = Linear(embed_dim, num_heads * head_dim, bias=qkv_bias)
        self.k_proj = Linear(embed_dim, num_kv_heads * head_dim, bias=qkv_bias)
        self.v_proj = Linear(embed_dim, num_kv_heads * head_dim, bias=qkv_bias)
        self.o_proj = Linear(num_heads * head_dim, embed_dim, bias=output_bias)
        self.q_norm = q_norm
        self.k_norm = k_norm

    def forward(
        self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], cache: CacheView, layer: int
    ) -> torch.Tensor:
        """Attention of the step's tokens `x` `[T, E]` over their sequences; returns `[T, E]`."""
        q, k, v = self.project(x, rope)
        cache.write(layer, k, v)
        mixed = attend(q, cache, layer, scale=self.scale)
        y: torch.Tensor = self.o_proj(mixed.flatten(1))
        return y

    def project(
        self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries `[T, H, D]`, keys and values `[T, K, D]` of tokens `x` `[T, E]`, as attention takes them."""
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return apply_rope(q, rope), apply_rope(k, rope), v
