"""Products with weights, quantised or in bf16, by themselves, on random values, beside those that PyTorch has."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import linear

from kvist.bench.probed import Measured, Timing, time_in_turn
from kvist.errors import OptionError
from kvist.kernels import native
from kvist.kernels.caches import last_level_cache_bytes
from kvist.kernels.weight_codec import GROUP_COLUMNS, WEIGHT_FORMATS, QuantisedWeight, pack, quantise
from kvist.memory import available_bytes, binary_size

PRODUCT_FORMATS = (*WEIGHT_FORMATS, "bf16")
PYTORCH_BF16, PYTORCH_INT8 = "PyTorch bf16", "PyTorch _int_mm"
# The copies of a matrix are so many times as large as the caches, and no smaller than what the bandwidth is read from.
_COPIES_PER_CACHE, _LEAST_COPIES_BYTES = 2, 1 << 28
# A run over all copies is cut short after so many operations: many rows are bound by those, and the next run goes on
# with the next copies.
_MOST_FLOP = 2e10


@dataclass(frozen=True)
class MatrixShape:
    """A matrix of weights.

    Args:
        num_rows: `N`, the numbers of each result.
        num_columns: `K`, those of each input; a multiple of 32.
    """

    num_rows: int
    num_columns: int

    @classmethod
    def parse(cls, text: str) -> MatrixShape:
        """A shape like `1536x576`.

        Raises:
            OptionError: it is none, or its columns are no multiple of 32.
        """
        rows, _, columns = text.partition("x")
        if not (rows.isdecimal() and columns.isdecimal() and int(rows) and int(columns)):
            raise OptionError(f"shapes has '{text}': write rows and columns of a matrix like 1536x576")
        shape = cls(int(rows), int(columns))
        if shape.num_columns % GROUP_COLUMNS:
            raise OptionError(f"shapes has '{text}': the columns, {columns}, must be a multiple of {GROUP_COLUMNS}")
        return shape

    def __str__(self) -> str:
        return f"{self.num_rows}x{self.num_columns}"


@dataclass(frozen=True, kw_only=True)
class ProductRow:
    """A matrix in one format, times so many rows.

    Attributes:
        shape: of the matrix.
        name: of the format, or of PyTorch's product.
        rows: of the input.
        seconds: of one product.
        ratio_to_one: over the seconds of one row; None where that was not measured.
        weights_bytes: that a product reads.
        gb_per_s: of weights that were read.
        roofline_fraction: of the read bandwidth.
        gop_per_s: operations, a multiplication and an addition each, in billions per second.
        bandwidth_gb_per_s, spread_fraction, repetitions, discarded, is_steady: as in `TimingFields`.
    """

    shape: str
    name: str
    rows: int
    seconds: float
    ratio_to_one: float | None
    weights_bytes: int
    gb_per_s: float
    roofline_fraction: float
    gop_per_s: float
    bandwidth_gb_per_s: float
    spread_fraction: float
    repetitions: int
    discarded: int
    is_steady: bool


class RepeatedProduct:
    """A product with copies of a matrix in turn, so that each is read from memory.

    Args:
        timed: multiplies with the copies of these numbers, one after another; its seconds.
        num_copies: that there are.
        num_products: in one run.
    """

    def __init__(self, timed: Callable[[Sequence[int]], float], num_copies: int, num_products: int) -> None:
        self._timed, self._num_copies, self._num_products = timed, num_copies, num_products
        self._next = 0

    def run(self) -> Measured:
        """The seconds of one product, over a run of them."""
        indices = [(self._next + index) % self._num_copies for index in range(self._num_products)]
        self._next = (indices[-1] + 1) % self._num_copies
        return Measured(self._timed(indices) / len(indices))


def product_rows(
    shape: MatrixShape,
    rows: Sequence[int],
    formats: Sequence[str],
    repetitions: int,
    bandwidth: Callable[[], float],
    told: Callable[[int, int], None] = lambda turn, turns: None,
) -> list[ProductRow]:
    """Time products with one matrix, formats and numbers of rows in turn, and PyTorch's own beside them.

    Args:
        shape: of the matrix.
        rows: of the input.
        formats: some of `PRODUCT_FORMATS`.
        repetitions: that are to count.
        bandwidth: the read bandwidth of the moment, bytes per second.
        told: how many turns are through.

    Raises:
        OptionError: the machine lacks the memory for the copies.
    """
    tasks, weights_bytes = {}, {}
    for name, (copy_bytes, timed_for) in _matrices(shape, formats).items():
        weights_bytes[name] = copy_bytes
        for count in rows:
            timed = timed_for(count)
            if timed is not None:
                flop, copies = _flop(shape, count), _num_copies(copy_bytes)
                tasks[name, count] = RepeatedProduct(timed, copies, min(copies, 1 + int(_MOST_FLOP / flop))).run
    timings = time_in_turn(tasks, repetitions, bandwidth, done=told)
    return [
        _row(shape, name, count, weights_bytes[name], timing, timings.get((name, 1)))
        for (name, count), timing in timings.items()
    ]


_TimedFor = Callable[[int], Callable[[Sequence[int]], float] | None]


def _matrices(shape: MatrixShape, formats: Sequence[str]) -> Mapping[str, tuple[int, _TimedFor]]:
    """The bytes of a copy, and what multiplies so many rows with copies; None where PyTorch does not do it."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(shape.num_rows, shape.num_columns, generator=generator)
    stored = {name: weights.bfloat16() if name == "bf16" else pack(quantise(weights, name)) for name in formats}
    sizes = [weight.data.nbytes for weight in stored.values()]
    sizes += [weights.numel() * 2, weights.numel()]
    needed = sum(size * _num_copies(size) for size in sizes)
    if needed > (free := available_bytes()):
        raise OptionError(
            f"copies of {shape} that are larger than the caches take {binary_size(needed)}, and {binary_size(free)} "
            "are free: ask for fewer formats or smaller shapes"
        )
    found = {name: (weight.data.nbytes, _native(weight)) for name, weight in stored.items()}
    found[PYTORCH_BF16] = sizes[-2], _pytorch(weights.bfloat16(), linear)
    codes = (weights * 40).clamp(-127, 127).to(torch.int8)
    found[PYTORCH_INT8] = sizes[-1], _pytorch(codes.T.contiguous(), torch._int_mm)
    return found


def _native(weight: QuantisedWeight | torch.Tensor) -> _TimedFor:
    # Copies in one tensor lie at multiples of 64 bytes, as tiles do.
    copies = weight.data.repeat(_num_copies(weight.data.nbytes), 1, 1)
    if isinstance(weight, torch.Tensor):
        num_rows, num_columns = weight.shape
        handles = list(map(native.linear_weight, copies))
    else:
        num_rows, num_columns = weight.num_rows, weight.num_columns
        handles = [native.linear_weight(replace(weight, data=data)) for data in copies]
    threads = torch.get_num_threads()

    def timed_for(rows: int) -> Callable[[Sequence[int]], float]:
        x, y = _input(rows, num_columns), torch.empty(rows, num_rows)

        def timed(indices: Sequence[int]) -> float:
            # As a native layer calls it: no tensor passes through Python meanwhile.
            calls = [(handles[index], native.capsule(x), native.capsule(y)) for index in indices]
            began_s = time.perf_counter()
            for handle, of_x, of_y in calls:
                handle.apply(of_x, of_y, num_threads=threads)
            return time.perf_counter() - began_s

        return timed

    return timed_for


def _pytorch(matrix: torch.Tensor, product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> _TimedFor:
    copies = matrix.repeat(_num_copies(matrix.nbytes), 1, 1).unbind()
    num_columns = matrix.shape[0 if matrix.dtype == torch.int8 else 1]

    def timed_for(rows: int) -> Callable[[Sequence[int]], float] | None:
        x = _input(rows, num_columns)
        x = (x * 40).clamp(-127, 127).to(torch.int8) if matrix.dtype == torch.int8 else x.to(matrix.dtype)
        try:
            product(x, copies[0])
        except RuntimeError:  # some platforms have no product of int8, or none of few rows
            return None

        @torch.inference_mode()
        def timed(indices: Sequence[int]) -> float:
            began_s = time.perf_counter()
            for index in indices:
                product(x, copies[index])
            return time.perf_counter() - began_s

        return timed

    return timed_for


def _input(rows: int, num_columns: int) -> torch.Tensor:
    return torch.randn(rows, num_columns, generator=torch.Generator().manual_seed(1))


def _num_copies(copy_bytes: int) -> int:
    return max(_LEAST_COPIES_BYTES, _COPIES_PER_CACHE * (last_level_cache_bytes() or 0)) // copy_bytes + 1


def _flop(shape: MatrixShape, rows: int) -> float:
    return 2.0 * shape.num_rows * shape.num_columns * rows


def _row(
    shape: MatrixShape, name: str, rows: int, weights_bytes: int, timing: Timing, of_one: Timing | None
) -> ProductRow:
    read_per_s = weights_bytes / timing.seconds
    return ProductRow(
        shape=str(shape),
        name=name,
        rows=rows,
        seconds=timing.seconds,
        ratio_to_one=None if of_one is None else timing.seconds / of_one.seconds,
        weights_bytes=weights_bytes,
        gb_per_s=read_per_s / 1e9,
        roofline_fraction=read_per_s / timing.bytes_per_s,
        gop_per_s=_flop(shape, rows) / timing.seconds / 1e9,
        **timing.fields(),
    )
