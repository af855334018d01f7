"""The attention of the models: a step's packed tokens over the pages of a KV cache."""

from __future__ import annotations

import torch
from torch import nn

from kvist.attention.attend import attend
from kvist.attention.heads import AttentionHeads, Rope
from kvist.cache.cache_view import CacheView


class StepAttention(AttentionHeads):
    """The attention of a model's decoder layer: project, write to the cache, attend over it, project back.

    `GroupedQueryAttention` is the same over padded tensors. This one packs all sequences, and trains no weights.

    Args:
        window: tokens that a query sees, itself included; None sees all. Attention goes by that of the cache's
            layer, which is the same; this is for who looks at the queries and keys by themselves.
        embed_dim, num_heads, num_kv_heads, head_dim, scale, qkv_bias, output_bias, q_norm, k_norm: as in
            `AttentionHeads`.
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
        super().__init__(
            embed_dim=embed_dim,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            scale=scale,
            qkv_bias=qkv_bias,
            output_bias=output_bias,
            q_norm=q_norm,
            k_norm=k_norm,
        )
        self.window = window

    def forward(self, x: torch.Tensor, rope: Rope, cache: CacheView, layer: int) -> torch.Tensor:
        """Attention of the step's tokens `x` `[T, E]` over their sequences; returns `[T, E]`."""
        q, k, v = self.project(x, rope)
        cache.write(layer, k, v)
        return self.output(attend(q, cache, layer, scale=self.scale))
