"""Products with plain weights, by PyTorch."""

from __future__ import annotations

import torch
from torch import nn


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ W.T` of `x` `[..., E]`, two dims at least, whose rows in bf16 have the same bits whatever their number.

    PyTorch rounds a single row otherwise than the same row among others: it is computed as two.
    """
    if x.dtype == torch.bfloat16 and x.numel() == x.shape[-1]:
        return nn.functional.linear(x.expand(2, *x.shape[1:]), weight, bias)[:1]
    return nn.functional.linear(x, weight, bias)


class Linear(nn.Linear):
    """A linear layer with plain weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return product(x, self.weight, self.bias)
