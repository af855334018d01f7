"""The feed-forward block of a decoder layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from kvist.kernels.plain_linear import Linear

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": nn.functional.silu,
    "gelu_tanh": partial(nn.functional.gelu, approximate="tanh"),
    "gelu": nn.functional.gelu,
    "relu": nn.functional.relu,
}


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)), the gated feed-forward of arXiv 2002.05202.

    Args:
        embed_dim: `E`.
        mlp_dim: rows of `gate` and `up`.
        activation: one of `ACTIVATIONS`.
        bias: whether the three matrices add one.
    """

    def __init__(self, embed_dim: int, mlp_dim: int, activation: str, *, bias: bool = False) -> None:
        super().__init__()
        self.activation = activation
        self.gate_proj = Linear(embed_dim, mlp_dim, bias=bias)
        self.up_proj = Linear(embed_dim, mlp_dim, bias=bias)
        self.down_proj = Linear(mlp_dim, embed_dim, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down_proj(ACTIVATIONS[self.activation](self.gate_proj(x)) * self.up_proj(x))
        return y
