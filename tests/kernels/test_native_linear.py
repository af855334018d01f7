"""Native products with quantised weights against their plain twin: the same bits."""

from __future__ import annotations

import os
import random as python_random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvist.kernels import native
from kvist.kernels.linear import linear, quantise_rows
from kvist.kernels.native_types import LinearWeight
from kvist.kernels.weight_codec import WEIGHT_FORMATS, QuantisedWeight, decode, pack, quantise

# Rows and columns of the matrix around every border: of a tile, of a panel of four, of a pair of groups.
SHAPES = [(1, 32), (16, 64), (17, 96), (63, 32), (64, 160), (65, 576), (130, 1024), (200, 2048)]
# Rows around those that meet a tile at once, and a panel.
ROW_COUNTS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 15, 16, 17, 18, 19, 23, 25, 47, 48, 49, 100, 300]
DTYPES = [torch.float32, torch.bfloat16]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def matrix(num_rows: int, num_columns: int, format: str, seed: int = 0, *, fine_rows: bool = False) -> QuantisedWeight:
    return replace(pack(quantise(random(num_rows, num_columns, seed=seed) * 0.05, format)), fine_rows=fine_rows)


def rows(count: int, num_columns: int, seed: int = 1) -> torch.Tensor:
    """Rows of different sizes, with a group of zeros and one of tiny numbers."""
    x = random(count, num_columns, seed=seed) * random(count, 1, seed=seed + 1).mul(3).exp()
    x[0, :32] = 0
    x[-1, :32] *= 1e-35
    return x


def apply(
    weight: LinearWeight, num_rows: int, x: torch.Tensor, dtype: torch.dtype | None = None, num_threads: int = 1
) -> torch.Tensor:
    out = torch.full((len(x), num_rows), 7.0, dtype=dtype or x.dtype)
    weight.apply(x, out, num_threads=num_threads)
    return out


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two results are equal; what is no number has no bits that are promised."""
    spoilt = a.isnan()
    integers = torch.int32 if a.dtype == torch.float32 else torch.int16
    zeroed = (x.masked_fill(spoilt, 0).view(integers) for x in (a, b))
    return a.dtype == b.dtype and torch.equal(spoilt, b.isnan()) and torch.equal(*zeroed)


@pytest.mark.parametrize("fine_rows", [False, True])
@pytest.mark.parametrize("format", WEIGHT_FORMATS)
@pytest.mark.parametrize(("num_rows", "num_columns"), SHAPES)
def test_it_is_the_twin_to_the_bit(format: str, num_rows: int, num_columns: int, fine_rows: bool) -> None:
    weight = matrix(num_rows, num_columns, format, fine_rows=fine_rows)
    handle = native.linear_weight(weight)
    for count in ROW_COUNTS:
        x = rows(count, num_columns, seed=count).to(DTYPES[count % 2])
        for dtype in DTYPES:
            given = apply(handle, num_rows, x, dtype, num_threads=1 + count % 4)
            assert same_bits(given, linear(x, weight, dtype)), (count, dtype)


@pytest.mark.parametrize("format", WEIGHT_FORMATS)
def test_it_is_nearly_the_product_with_the_decoded_weights(format: str) -> None:
    weight, x = matrix(96, 576, format), random(20, 576, seed=3)
    exact = x.double() @ decode(weight).double().T
    assert (linear(x, weight) - exact).norm() < 0.008 * exact.norm()
    assert (linear(x, replace(weight, fine_rows=True)) - exact).norm() < 4e-5 * exact.norm()


@pytest.mark.parametrize("fine_rows", [False, True])
@pytest.mark.parametrize("format", WEIGHT_FORMATS)
def test_a_row_has_the_same_bits_at_every_row_count_and_number_of_threads(format: str, fine_rows: bool) -> None:
    weight = matrix(200, 160, format, fine_rows=fine_rows)
    handle, x = native.linear_weight(weight), rows(300, 160)
    expected = linear(x, weight)
    rng = python_random.Random(0)
    for count in range(1, 301):
        first = rng.randrange(301 - count)
        given = apply(handle, 200, x[first : first + count], num_threads=rng.choice([1, 2, 3, 4]))
        assert same_bits(given, expected[first : first + count]), count


@pytest.mark.parametrize("fine_rows", [False, True])
@pytest.mark.parametrize("format", ["int8", "int4_min"])
def test_rows_that_are_taken_in_slices_have_the_same_bits(format: str, fine_rows: bool) -> None:
    """So many numbers that their codes would not stay in the cache."""
    weight, x = matrix(48, 8192, format, fine_rows=fine_rows), rows(300, 8192)
    handle = native.linear_weight(weight)
    assert same_bits(apply(handle, 48, x, num_threads=2), linear(x, weight))


@pytest.mark.parametrize("format", WEIGHT_FORMATS)
def test_the_largest_codes_do_not_overflow(format: str) -> None:
    weight = matrix(32, 64, format)
    for byte in (0x00, 0xFF):
        data = weight.data.clone()
        codes = data[:, 64:] if weight.kind.has_minimum is False else data.view(2, 2, 320)[..., 64:]
        codes.fill_(byte)
        extreme = QuantisedWeight(format, 32, 64, data)
        x = torch.tensor([1.0, -1.0]).repeat_interleave(10).unsqueeze(1).expand(20, 64).contiguous()
        assert same_bits(apply(native.linear_weight(extreme), 32, x), linear(x, extreme))


@pytest.mark.parametrize("format", WEIGHT_FORMATS)
def test_steps_may_be_small_large_and_negative(format: str) -> None:
    """All that fp16 has, whatever of it an instruction set must make by itself."""
    weight = matrix(48, 96, format)
    steps = torch.randint(-(2**15), 2**15, (48, 3), dtype=torch.int16, generator=torch.Generator().manual_seed(2))
    steps = torch.where(steps.view(torch.float16).isfinite(), steps, 0x7E00).view(torch.float16)
    codes = quantise(random(48, 96), format)
    minima = None if codes.minima is None else steps.flip(0)
    weight = pack(type(codes)(codes.kind, codes.codes, steps, minima))
    x = rows(20, 96)
    assert same_bits(apply(native.linear_weight(weight), 48, x), linear(x, weight))
    assert same_bits(apply(native.linear_weight(weight), 48, x[:3]), linear(x[:3], weight))


def test_rows_of_any_stride_give_the_same_bits() -> None:
    weight = matrix(40, 96, "int4")
    handle = native.linear_weight(weight)
    for count in (3, 30):
        x = rows(count, 96)
        wide, out = torch.zeros(count, 131), torch.full((count, 50), 5.0)
        wide[:, 2:98] = x
        handle.apply(wide[:, 2:98], out[:, 3:43], num_threads=2)
        assert same_bits(out[:, 3:43], linear(x, weight))
        assert (out[:, :3] == 5).all()
        assert (out[:, 43:] == 5).all()
        repeated = x[1:2].expand(count, 96)
        assert same_bits(apply(handle, 40, repeated), linear(x[1:2], weight).expand(count, 40))


def test_no_rows_are_no_work() -> None:
    handle = native.linear_weight(matrix(40, 96, "int4"))
    handle.apply(torch.zeros(0, 96), torch.zeros(0, 40), num_threads=2)


def test_capsules_do_as_well_as_tensors() -> None:
    weight, x = matrix(40, 96, "int4"), rows(3, 96).bfloat16()
    out = torch.empty(3, 40, dtype=torch.bfloat16)
    capsules = (torch.to_dlpack(tensor) for tensor in (x, out))  # type: ignore[attr-defined]  # it is public
    native.linear_weight(weight).apply(*capsules, num_threads=1)
    assert same_bits(out, linear(x, weight))


def test_a_weight_keeps_its_bytes_alive() -> None:
    weight = matrix(64, 512, "int8")
    x = rows(2, 512)
    expected = linear(x, weight)
    handle = native.linear_weight(QuantisedWeight("int8", 64, 512, weight.data.clone()))
    overwriting = [torch.full_like(weight.data, 255) for _ in range(8)]
    assert same_bits(apply(handle, 64, x), expected)
    del overwriting


# --- what is no number ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("format", WEIGHT_FORMATS)
@pytest.mark.parametrize("count", [5, 40])
def test_what_is_no_number_spoils_its_own_row_alone(what: float, format: str, count: int) -> None:
    for fine_rows in (False, True):
        weight = matrix(40, 96, format, fine_rows=fine_rows)
        handle, x = native.linear_weight(weight), rows(count, 96)
        expected = apply(handle, 40, x)
        assert expected.isfinite().all()
        x[2, 70] = what
        for dtype in DTYPES:
            assert apply(handle, 40, x, dtype)[2].isnan().all()
        given = apply(handle, 40, x)
        assert same_bits(given, linear(x, weight))
        given[2] = expected[2] = 0
        assert same_bits(given, expected)


def test_a_weight_that_is_no_number_spoils_its_own_column_alone() -> None:
    weights = random(40, 96) * 0.05
    weights[7, 50] = float("nan")
    x = rows(5, 96)
    for format in WEIGHT_FORMATS:
        weight = pack(quantise(weights, format))
        given = apply(native.linear_weight(weight), 40, x)
        assert same_bits(given, linear(x, weight))
        assert torch.equal(given.isnan().all(0), torch.arange(40) == 7)
        assert torch.equal(given.isnan().any(0), torch.arange(40) == 7)


def test_rows_are_coded_to_127_steps_either_way() -> None:
    codes, steps = quantise_rows(rows(50, 160))
    decoded = (codes * steps.unsqueeze(2)).flatten(1)
    assert codes.abs().amax() == 127
    assert ((decoded - rows(50, 160)).abs() <= steps.repeat_interleave(32, 1) * 0.5001 + 1e-30).all()


# --- the border -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(3, 96, dtype=torch.float16)}, "x must have dtype float32 or bfloat16"),
        ({"x": torch.zeros(96)}, "x has 1 dimensions: it must have 2"),
        ({"x": torch.zeros(3, 64)}, "x has 64 columns: it must have 96"),
        ({"x": torch.zeros(3, 192)[:, ::2]}, "x has stride 2 in its last dimension: it must be 1"),
        ({"x": torch.zeros(2, 96)}, "out has 3 rows: it must have the 2 of x"),
        ({"out": torch.zeros(3, 40, dtype=torch.float64)}, "out must have dtype float32 or bfloat16"),
        ({"out": torch.zeros(3, 48)}, "out has 48 columns: it must have 40"),
        ({"out": torch.zeros(3, 40, 1)}, "out has 3 dimensions: it must have 2"),
        ({"out": torch.zeros(40, 3).T}, "out has stride 3 in its last dimension: it must be 1"),
        ({"out": torch.zeros(1, 40).expand(3, 40)}, "out must not overlap itself"),
        ({"out": None}, "x and out must not overlap"),
        ({"num_threads": 0}, "num_threads is 0: it must be from 1 to 1024"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_product_says_what_is_wrong_with_its_arguments(changes: dict[str, object], message: str) -> None:
    both = torch.zeros(3, 136)
    arguments: dict[str, object] = {"x": torch.zeros(3, 96), "out": torch.zeros(3, 40), "num_threads": 1} | changes
    if arguments["out"] is None:
        arguments |= {"x": both[:, :96], "out": both[:, 90:130]}
    with pytest.raises(ValueError, match=re.escape(message)):
        native.linear_weight(matrix(40, 96, "int4")).apply(**arguments)  # type: ignore[arg-type]


def test_a_result_is_not_written_over_the_weights() -> None:
    weight = matrix(40, 96, "int4")
    handle, before = native.linear_weight(weight), weight.data.clone()
    in_weights = weight.data.view(-1)[: 4 * 3 * 96].view(torch.float32).view(3, 96)
    with pytest.raises(ValueError, match="out must not overlap the weights"):
        handle.apply(torch.zeros(3, 96), in_weights[:, :40], num_threads=1)
    with pytest.raises(ValueError, match="out must not overlap the weights"):
        handle.decode_rows(torch.arange(3), in_weights)
    rows = torch.zeros(3 * 48, dtype=torch.int64)
    with pytest.raises(ValueError, match="rows and out must not overlap"):
        handle.decode_rows(rows[:3], rows.view(torch.float32).view(3, 96))
    assert torch.equal(weight.data, before)


@pytest.mark.parametrize("argument", ["x", "out"])
def test_nothing_is_no_tensor(argument: str) -> None:
    arguments: dict[str, object] = {"x": torch.zeros(3, 96), "out": torch.zeros(3, 40)} | {argument: None}
    with pytest.raises(TypeError):
        native.linear_weight(matrix(40, 96, "int4")).apply(**arguments, num_threads=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "int5"}, "format is 'int5': that is no format of weights"),
        ({"num_rows": 0}, "num_rows is 0: it must be from 1"),
        ({"num_columns": 80}, "num_columns is 80: it must be a multiple of 32"),
        ({"num_columns": -32}, "num_columns is -32: it must be from 1"),
        ({"num_rows": 49}, "data must have the shape [4, 896] for int4 weights of 49 rows and 96 columns"),
        ({"format": "int8"}, "data must have the shape [3, 1664]"),
        ({"data": torch.zeros(3, 896, dtype=torch.int8)}, "data must have dtype uint8"),
        ({"data": torch.zeros(3 * 896, dtype=torch.uint8)}, "data has 1 dimensions: it must have 2"),
        ({"data": torch.zeros(3, 900, dtype=torch.uint8)[:, :896]}, "data must be contiguous"),
        ({"data": torch.zeros(3 * 896 + 8, dtype=torch.uint8)[8:].view(3, 896)}, "data must be aligned to 64 bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_weight_says_what_is_wrong_with_it(changes: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "format": "int4",
        "num_rows": 40,
        "num_columns": 96,
        "data": matrix(40, 96, "int4").data,
    } | changes
    with pytest.raises(ValueError, match=re.escape(message)):
        native.linear_weight(QuantisedWeight(**arguments))  # type: ignore[arg-type]


# --- instruction sets -------------------------------------------------------------------------------------------------

EVERY_FORMAT = f"""
import sys
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parent.parent)!r}]
import test_native_linear as test
print(test.native.isa())
for format in test.WEIGHT_FORMATS:
    for num_rows, num_columns in test.SHAPES[:6]:
        for fine_rows in (False, True):
            test.test_it_is_the_twin_to_the_bit(format, num_rows, num_columns, fine_rows)
    test.test_the_largest_codes_do_not_overflow(format)
    test.test_steps_may_be_small_large_and_negative(format)
    test.test_what_is_no_number_spoils_its_own_row_alone(float("nan"), format, 40)
test.test_a_weight_that_is_no_number_spoils_its_own_column_alone()
"""


@pytest.mark.parametrize("isa", native.available_isas())
def test_every_instruction_set_gives_the_bits_of_the_twin(isa: str) -> None:
    environment = os.environ | {native.MAX_ISA_VARIABLE: isa}
    result = subprocess.run(
        [sys.executable, "-c", EVERY_FORMAT], capture_output=True, text=True, env=environment, check=False
    )
    assert (result.stdout.strip(), result.stderr, result.returncode) == (isa, "", 0)
