"""The rotation of quantised vectors: it spreads a few large dims over many, and keeps lengths and products."""

from __future__ import annotations

import torch


def rotate(x: torch.Tensor) -> torch.Tensor:
    """The Hadamard rotation of vectors `[D, ...]` in blocks of the largest power of two that divides D.

    Butterflies of neighbours come first, then of ever more distant dims; the factor that keeps lengths comes last.
    """
    head_dim = len(x)
    block = head_dim & -head_dim
    y = x.contiguous()
    row = y[0].numel()
    buffers = torch.empty((2, *y.shape), dtype=y.dtype, device=y.device)
    for stage in range(block.bit_length() - 1):
        shape = (head_dim >> (stage + 1), 2, 1 << stage, row)
        low, high = y.view(shape).unbind(1)
        y = buffers[stage % 2]
        total, difference = y.view(shape).unbind(1)
        torch.add(low, high, out=total)
        torch.sub(low, high, out=difference)
    return y.mul(block**-0.5)
