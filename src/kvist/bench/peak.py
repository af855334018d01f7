"""The most operations per second that PyTorch's products reach: what those of a kernel are set against."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.nn.functional import linear

# Rows, columns, and columns of the product. Which shape and layout is the fastest depends on the library and the CPU.
SIZES = (
    *((512, 512, 512), (1024, 1024, 1024), (2048, 2048, 2048), (4096, 4096, 4096)),
    *((1024, 576, 1536), (4096, 1024, 1024), (1024, 4096, 4096)),
)
# After the first turn so many of all products go on.
_KEPT = 3


class PeakProducts:
    """Products of one dtype, in several sizes and layouts.

    The first turn tries them all, the others repeat the fastest. So a peak can be measured in turn with what is
    compared with it, and meets what the machine does meanwhile as that does.

    Args:
        dtype: bfloat16, or int8, whose products are int32.
        sizes: `(M, K, N)` of products `[M, K] x [K, N]`.

    Attributes:
        flop_per_s: the most that any product has reached, a multiplication and an addition for each pair; 0 before the
            first turn.
    """

    def __init__(self, dtype: torch.dtype, sizes: Sequence[tuple[int, int, int]]) -> None:
        self._products = [product for size in sizes for product in _products(dtype, size)]
        self.flop_per_s = 0.0

    def measure(self) -> None:
        """One turn."""
        rates = [_flop_per_s(*product) for product in self._products]
        self.flop_per_s = max(self.flop_per_s, *rates)
        fastest = sorted(range(len(rates)), key=rates.__getitem__, reverse=True)[:_KEPT]
        self._products = [self._products[index] for index in fastest]


def _products(dtype: torch.dtype, size: tuple[int, int, int]) -> Iterator[tuple[float, Callable[[], torch.Tensor]]]:
    """Each with its operations."""
    rows, columns, columns_out = size
    flop = 2.0 * rows * columns * columns_out
    generator = torch.Generator().manual_seed(0)
    left, right = (
        torch.randint(-127, 128, shape, generator=generator).to(dtype)
        for shape in ((rows, columns), (columns, columns_out))
    )
    transposed = right.T.contiguous()  # a layer's weights lie like this
    if dtype == torch.int8:
        yield flop, lambda: torch._int_mm(left, right)
        yield flop, lambda: torch._int_mm(left, transposed.T)
    else:
        yield flop, lambda: torch.mm(left, right)
        yield flop, lambda: torch.mm(left, transposed.T)
        yield flop, lambda: linear(left, transposed)


def _flop_per_s(flop: float, product: Callable[[], torch.Tensor]) -> float:
    """Of the faster of two calls: the first may prepare something."""
    best = float("inf")
    with torch.inference_mode():
        for _ in range(2):
            began_s = time.perf_counter()
            product()
            best = min(best, time.perf_counter() - began_s)
    return flop / best
