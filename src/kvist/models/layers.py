"""The layers that decoder families are built from.

They round where the Hugging Face implementations round, so that bf16 results stay comparable.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from kvist.attention import GatedMLP, StepAttention
from kvist.cache.cache_view import CacheView

if TYPE_CHECKING:
    from kvist.models.native_layer import NativeLayer


class RMSNorm(nn.Module):
    """Root mean square norm over the last dim (arXiv 1910.07467).

    Attributes:
        offset: what is added to the weight.
    """

    offset = 0.0

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * normalised(x, self.eps).to(x.dtype)


class OffsetRMSNorm(RMSNorm):
    """Gemma's norm: the weight is kept minus one, and applied before rounding."""

    offset = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (normalised(x, self.eps) * (self.offset + self.weight.float())).to(x.dtype)


def normalised(x: torch.Tensor, eps: float) -> torch.Tensor:
    """`x` divided by the root of its mean square over the last dim, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


@dataclass(frozen=True)
class LayerParts:
    """What a decoder layer is made of: `x += output_norm(block(input_norm(x)))`, for attention and then for the MLP.

    Norms of outputs are None where a family has none.
    """

    attention: StepAttention
    attention_input_norm: RMSNorm
    attention_output_norm: RMSNorm | None
    mlp: GatedMLP
    mlp_input_norm: RMSNorm
    mlp_output_norm: RMSNorm | None


class DecoderLayer(nn.Module, ABC):
    """A decoder layer. `native_layer.LayerSteps` runs it."""

    native: NativeLayer | None = None
    """The layer as the native library has it: made by `use_native_layers` or a step, anew where the layer changed."""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        # It would keep the memory that the weights leave.
        self.native = None
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call, no-any-return]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"native": None}

    @abstractmethod
    def forward(
        self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], cache: CacheView, layer: int
    ) -> torch.Tensor:
        """Hidden states `[T, E]` after layer number `layer`, from those before it. Writes to the cache."""

    @abstractmethod
    def parts(self) -> LayerParts:
        """What `forward` computes with."""


class PreNormLayer(DecoderLayer):
    """A decoder layer that norms before attention and before the MLP and adds each to the stream."""

    def __init__(self, embed_dim: int, eps: float, attention: StepAttention, mlp: GatedMLP) -> None:
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

    def parts(self) -> LayerParts:
        return LayerParts(
            attention=self.self_attn,
            attention_input_norm=self.input_layernorm,
            attention_output_norm=None,
            mlp=self.mlp,
            mlp_input_norm=self.post_attention_layernorm,
            mlp_output_norm=None,
        )
