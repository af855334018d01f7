"""Products with plain weights, by PyTorch."""

from __future__ import annotations

from functools import cache

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


# Rows that are computed together, and columns and rows of matrices, small ones and those of a layer.
_ROW_COUNTS = (1, 2, 3, 7, 16, 33, 64)
_MATRICES = ((64, 48), (576, 1536), (1536, 576))


@cache
def bf16_rows_keep_their_bits() -> bool:
    """Whether products in bf16 on this machine's CPU give a row the same bits whatever its number of neighbours.

    It is tried once, with random numbers, for some ms: a proof for the shapes that are tried, and a sign for others.
    """
    generator = torch.Generator().manual_seed(0)
    for columns, rows in _MATRICES:
        weight = torch.randn(rows, columns, generator=generator).bfloat16()
        x = torch.randn(_ROW_COUNTS[-1], columns, generator=generator).bfloat16()
        whole = product(x, weight)
        if not all(torch.equal(product(x[-count:], weight), whole[-count:]) for count in _ROW_COUNTS):
            return False
    return True
