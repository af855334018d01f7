"""A layer's attention in plain PyTorch: over whole texts, without a cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from kvist.attention import apply_rope
from kvist.convert.attention_weights import AttentionWeights
from kvist.models.decoder import Decoder
from kvist.models.layers import DecoderLayer


def decoder_layers(decoder: Decoder) -> list[DecoderLayer]:
    """A decoder's layers, in order."""
    return [module for module in decoder.modules() if isinstance(module, DecoderLayer)]


@dataclass(frozen=True)
class AttentionRules:
    """What a layer's attention does besides its projections; the same for any number of KV heads.

    Attributes:
        rope: cosine and sine for each position of a text, `[L, 1, D]` each.
        mask: whether a query may see a key, `[L, L]`.
        scale: multiplies the scores.
        q_norm, k_norm: norms over the head dim, if any.
    """

    rope: tuple[torch.Tensor, torch.Tensor]
    mask: torch.Tensor
    scale: float
    q_norm: nn.Module | None
    k_norm: nn.Module | None

    @classmethod
    def of(cls, decoder: Decoder, layer: int, length: int) -> AttentionRules:
        """Those of a layer for texts of `length` tokens, float32. The norms are the layer's own."""
        attention = decoder_layers(decoder)[layer].parts().attention
        position = torch.arange(length)
        distance = position.unsqueeze(1) - position
        seen = distance >= 0
        window = decoder.config.windows[layer]
        return cls(
            rope=decoder.rope_tables(decoder.rope_of(layer), position, torch.float32),
            mask=seen if window is None else seen & (distance < window),
            scale=attention.scale,
            q_norm=attention.q_norm,
            k_norm=attention.k_norm,
        )

    @property
    def turns_with_rope(self) -> bool:
        """Whether queries and keys may be turned alike, plane by plane, without a change of the scores."""
        return self.q_norm is None and self.k_norm is None


def mixed_values(x: torch.Tensor, weights: AttentionWeights, rules: AttentionRules) -> torch.Tensor:
    """What the output projection takes, `[L, H D]`, for inputs `[L, E]`."""
    x = weights.with_ones(x)
    q, k, v = (
        nn.functional.linear(x, heads.flatten(0, 1)).view(*x.shape[:-1], *heads.shape[:2])
        for heads in (weights.query, weights.key, weights.value)
    )
    if rules.q_norm is not None and rules.k_norm is not None:
        q, k = rules.q_norm(q), rules.k_norm(k)
    q, k = apply_rope(q, rules.rope), apply_rope(k, rules.rope)
    mixed = nn.functional.scaled_dot_product_attention(
        q.transpose(-3, -2),
        k.transpose(-3, -2),
        v.transpose(-3, -2),
        attn_mask=rules.mask,
        scale=rules.scale,
        enable_gqa=True,
    )
    return mixed.transpose(-3, -2).flatten(-2)


def attention(x: torch.Tensor, weights: AttentionWeights, rules: AttentionRules) -> torch.Tensor:
    """The attention's output `[L, E]`, less the output's bias, for inputs `[L, E]`."""
    return nn.functional.linear(mixed_values(x, weights, rules), weights.output.flatten(1))
