"""The layers that decoder families are built from.

They round where the Hugging Face implementations round, so that bf16 results stay comparable.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from kvist.attention import GroupedQueryAttention
from kvist.cache.cache_view import CacheView
from kvist.kernels.plain_linear import Linear


class RMSNorm(nn.Module):
    """Root mean square norm over the last dim (arXiv 1910.07467)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * normalised(x, self.eps).to(x.dtype)


class OffsetRMSNorm(RMSNorm):
    """Gemma's norm: the weight is kept minus one, and applied before rounding."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (normalised(x, self.eps) * (1.0 + self.weight.float())).to(x.dtype)


def normalised(x: torch.Tensor, eps: float) -> torch.Tensor:
    """`x` divided by the root of its mean square over the last dim, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)), the gated feed-forward of arXiv 2002.05202."""

    def __init__(
        self, embed_dim: int, mlp_dim: int, activation: Callable[[torch.Tensor], torch.Tensor], *, bias: bool = False
    ) -> None:
        super().__init__()
        self.activation = activation
        self.gate_proj = Linear(embed_dim, mlp_dim, bias=bias)
        self.up_proj = Linear(embed_dim, mlp_dim, bias=bias)
        self.down_proj = Linear(mlp_dim, embed_dim, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
        return y


class PreNormLayer(nn.Module):
    """A decoder layer that norms before attention and before the MLP and adds each to the stream."""

    def __init__(self, embed_dim: int, eps: float, attention: GroupedQueryAttention, mlp: GatedMLP) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(embed_dim, eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(embed_dim, eps)
        self.mlp = mlp

    def forward(
        self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], cache: CacheView, layer: int
    ) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, cache, layer)
        y: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y
