"""A decoder layer over padded tensors: attention, then a gated feed-forward block, each added to the stream."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from kvist.attention.gated_mlp import ACTIVATIONS, GatedMLP
from kvist.attention.grouped_query import GroupedQueryAttention, LayerCache
from kvist.checks import check_integer, check_number
from kvist.config import RopeConfig
from kvist.errors import OptionError, did_you_mean


class DecoderLayer(nn.Module):
    """Pre-norm: `x + attention(norm(x))`, then `x + mlp(norm(x))`. Post-norm: `norm(x + attention(x))`, and so on.

    With pre-norm and SiLU it is Llama's layer, and its parameters have the names that Llama's have.

    Args:
        embed_dim, num_heads, num_kv_heads, head_dim, bias, rope: as in `GroupedQueryAttention`.
        mlp_dim: of the feed-forward block; by default `4 * E`.
        pre_norm: where the norms stand (arXiv 2002.04745 compares both).
        activation: of the gate: one of `ACTIVATIONS`.
        dropout: the share that is dropped in training, of attention weights and of what is added to the stream.
        eps: of the norms.

    Raises:
        OptionError: as `GroupedQueryAttention`, or the activation is unknown.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int | None = None,
        bias: bool = False,
        *,
        mlp_dim: int | None = None,
        pre_norm: bool = True,
        activation: str = "silu",
        dropout: float = 0.0,
        rope: RopeConfig | None = None,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise OptionError(f"unknown activation '{activation}': {did_you_mean(activation, ACTIVATIONS)}")
        self.self_attn = GroupedQueryAttention(
            embed_dim, num_heads, num_kv_heads, head_dim, bias, dropout=dropout, rope=rope
        )
        mlp_dim = 4 * embed_dim if mlp_dim is None else check_integer("mlp_dim", mlp_dim, 1)
        self.mlp = GatedMLP(embed_dim, mlp_dim, activation, bias=bias)
        self.dropout = nn.Dropout(check_number("dropout", dropout, 0, 1))
        self.pre_norm = pre_norm
        if pre_norm:
            self.input_layernorm = nn.RMSNorm(embed_dim, eps)
            self.post_attention_layernorm = nn.RMSNorm(embed_dim, eps)
        else:
            self.post_attention_layernorm = nn.RMSNorm(embed_dim, eps)
            self.post_feedforward_layernorm = nn.RMSNorm(embed_dim, eps)

    def forward(
        self,
        x: torch.Tensor,
        cache: LayerCache | None = None,
        positions: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, LayerCache]:
        """Hidden states `[B, L, E]` after the layer, and its cache; the arguments are `GroupedQueryAttention`'s."""
        if self.pre_norm:
            y, cache = self._attention(self.input_layernorm(x), cache, positions, mask)
            x = x + y
            return x + self.dropout(self.mlp(self.post_attention_layernorm(x))), cache
        y, cache = self._attention(x, cache, positions, mask)
        x = self.post_attention_layernorm(x + y)
        return self.post_feedforward_layernorm(x + self.dropout(self.mlp(x))), cache

    def _attention(
        self, x: torch.Tensor, cache: LayerCache | None, positions: torch.Tensor | None, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, LayerCache]:
        y, kept = self.self_attn(x, cache, positions, mask)
        return self.dropout(y), cast(LayerCache, kept)
