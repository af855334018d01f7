"""Native products with weights of bf16, in the memory where they lie: near the exact product, a row always the same."""

from __future__ import annotations

import ctypes
import mmap
import os
import random as python_random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_native_linear import DTYPES, ROW_COUNTS, SHAPES, apply, random, rows, same_bits

from kvist.kernels import native


def matrix(num_rows: int, num_columns: int, seed: int = 0) -> torch.Tensor:
    return (random(num_rows, num_columns, seed=seed) * 0.05).bfloat16()


def misaligned(weight: torch.Tensor) -> torch.Tensor:
    """The same, one number off where PyTorch puts memory."""
    memory = torch.empty(weight.numel() + 1, dtype=weight.dtype)
    memory[1:] = weight.flatten()
    assert memory[1:].data_ptr() % 4 == 2
    return memory[1:].view(weight.shape)


def assert_near(given: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """As near as sums in 16 lanes of float32 are: each adds half a unit in the last place of what is summed."""
    exact = x.double() @ weight.double().T
    sizes = x.double().abs() @ weight.double().abs().T
    assert ((given - exact).abs() <= (x.shape[1] / 16 + 8) * 2**-24 * sizes + 1e-30).all()


@pytest.mark.parametrize(("num_rows", "num_columns"), SHAPES)
def test_it_is_nearly_the_exact_product(num_rows: int, num_columns: int) -> None:
    weight = matrix(num_rows, num_columns)
    handles = [native.linear_weight(weight), native.linear_weight(misaligned(weight))]
    for count in (*ROW_COUNTS, 70):
        x = rows(count, num_columns, seed=count).to(DTYPES[count % 2])
        given = apply(handles[0], num_rows, x, torch.float32)
        assert_near(given, x, weight)
        for dtype in DTYPES:
            # Rows of bf16 are the same numbers in fp32, and results are rounded at the end.
            other = apply(handles[1], num_rows, x.float(), dtype, num_threads=1 + count % 4)
            assert same_bits(other, given.to(dtype)), (count, dtype)


def test_a_row_has_the_same_bits_at_every_row_count_and_number_of_threads() -> None:
    handle, x = native.linear_weight(matrix(201, 160)), rows(300, 160)
    expected = torch.cat([apply(handle, 201, row.unsqueeze(0)) for row in x])
    rng = python_random.Random(0)
    for count in range(1, 301):
        first = rng.randrange(301 - count)
        given = apply(handle, 201, x[first : first + count], num_threads=rng.choice([1, 2, 3, 4]))
        assert same_bits(given, expected[first : first + count]), count


def test_an_output_has_the_same_bits_in_every_matrix() -> None:
    weight, x = matrix(70, 160), rows(40, 160)
    expected = apply(native.linear_weight(weight), 70, x)
    for first, stop in ((0, 1), (1, 70), (3, 36), (60, 69)):
        part = native.linear_weight(weight[first:stop])
        for count in (1, 3, 40):
            given = apply(part, stop - first, x[:count], num_threads=2)
            assert same_bits(given, expected[:count, first:stop].contiguous())


def test_rows_that_are_taken_in_slices_have_the_same_bits() -> None:
    """More numbers than stay in the cache, and more weights than a panel has."""
    handle, x = native.linear_weight(matrix(48, 8192)), rows(300, 8192)
    given = apply(handle, 48, x, num_threads=2)
    for first, count in ((0, 1), (47, 3), (130, 20)):
        assert same_bits(given[first : first + count], apply(handle, 48, x[first : first + count]))


def test_rows_of_any_stride_give_the_same_bits() -> None:
    handle = native.linear_weight(matrix(41, 96))
    for count in (3, 30):
        x = rows(count, 96)
        expected = apply(handle, 41, x)
        wide, out = torch.zeros(count, 131), torch.full((count, 50), 5.0)
        wide[:, 2:98] = x
        handle.apply(wide[:, 2:98], out[:, 3:44], num_threads=2)
        assert same_bits(out[:, 3:44].contiguous(), expected)
        assert (out[:, :3] == 5).all()
        assert (out[:, 44:] == 5).all()
        assert same_bits(apply(handle, 41, x[1:2].expand(count, 96)), expected[1:2].expand(count, 41).contiguous())


def test_no_rows_are_no_work() -> None:
    native.linear_weight(matrix(40, 96)).apply(torch.zeros(0, 96), torch.zeros(0, 40), num_threads=2)


def test_what_is_written_to_the_weights_is_computed_with() -> None:
    weight, x = matrix(40, 96), rows(3, 96)
    handle = native.linear_weight(weight)
    before = apply(handle, 40, x)
    weight[7] *= 2
    before[:, 7] *= 2
    assert same_bits(apply(handle, 40, x), before)


def test_a_weight_keeps_its_memory_alive() -> None:
    weight, x = matrix(64, 512), rows(2, 512)
    expected = apply(native.linear_weight(weight), 64, x)
    handle = native.linear_weight(weight.clone())
    overwriting = [torch.full_like(weight, 255) for _ in range(8)]
    assert same_bits(apply(handle, 64, x), expected)
    del overwriting


def test_rows_of_the_matrix_are_read_as_numbers() -> None:
    weight = misaligned(matrix(40, 96))
    weight[3, 5] = float("nan")
    chosen, out = torch.tensor([39, 0, 3, 3]), torch.empty(4, 96)
    native.linear_weight(weight).decode_rows(chosen, out)
    assert same_bits(out, weight[chosen].float())


@pytest.mark.parametrize(("num_rows", "num_columns"), [(1, 32), (5, 96), (64, 160)])
def test_nothing_behind_the_weights_is_read(num_rows: int, num_columns: int) -> None:
    weight, page = matrix(num_rows, num_columns), mmap.PAGESIZE
    room = -(-weight.nbytes // page) * page
    memory = mmap.mmap(-1, room + page)
    numbers = torch.frombuffer(memory, dtype=torch.bfloat16)
    at_end = numbers[(room - weight.nbytes) // 2 : room // 2].view(weight.shape)
    at_end.copy_(weight)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    guard = ctypes.c_void_p(numbers.data_ptr() + room)
    assert protect(guard, ctypes.c_size_t(page), 0) == 0
    try:
        for count in (1, 2, 5, 20):
            x = rows(count, num_columns)
            expected = apply(native.linear_weight(weight), num_rows, x)
            assert same_bits(apply(native.linear_weight(at_end), num_rows, x), expected)
    finally:
        protect(guard, ctypes.c_size_t(page), mmap.PROT_READ | mmap.PROT_WRITE)


# --- what is no number ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("count", [5, 40])
def test_what_is_no_number_spoils_its_own_row_alone(what: float, count: int) -> None:
    handle, x = native.linear_weight(matrix(40, 96)), rows(count, 96)
    expected = apply(handle, 40, x)
    assert expected.isfinite().all()
    x[2, 70] = what
    for dtype in DTYPES:
        given = apply(handle, 40, x, dtype)
        assert not given[2].isfinite().any()
        assert given[2].isnan().all() == (what != what)
        given[2] = expected[2]
        assert same_bits(given, expected.to(dtype))


def test_a_weight_that_is_no_number_spoils_its_own_column_alone() -> None:
    weight, x = matrix(40, 96), rows(9, 96)
    expected = apply(native.linear_weight(weight), 40, x)
    weight[7, 50] = float("nan")
    given = apply(native.linear_weight(weight), 40, x)
    assert given[:, 7].isnan().all()
    given[:, 7] = expected[:, 7]
    assert same_bits(given, expected)


# --- the border -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.zeros(40, 96), "data must have dtype bfloat16"),
        (torch.zeros(40, 96, dtype=torch.float16), "data must have dtype bfloat16"),
        (torch.zeros(40, 80, dtype=torch.bfloat16), "num_columns is 80: it must be a multiple of 32"),
        (torch.zeros(0, 96, dtype=torch.bfloat16), "num_rows is 0: it must be from 1"),
        (torch.zeros(40, 128, dtype=torch.bfloat16)[:, :96], "data must be contiguous"),
        (torch.zeros(96, 40, dtype=torch.bfloat16).T, "data has stride 40 in its last dimension: it must be 1"),
        (torch.zeros(40, 96, dtype=torch.bfloat16, device="meta"), "the tensor is on meta"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_weight_says_what_is_wrong_with_it(weight: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        native.linear_weight(weight)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(3, 96, dtype=torch.float16)}, "x must have dtype float32 or bfloat16"),
        ({"x": torch.zeros(3, 64)}, "x has 64 columns: it must have 96"),
        ({"out": torch.zeros(3, 48)}, "out has 48 columns: it must have 40"),
        ({"out": torch.zeros(2, 40)}, "out has 2 rows: it must have the 3 of x"),
        ({"out": torch.zeros(1, 40).expand(3, 40)}, "out must not overlap itself"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_product_says_what_is_wrong_with_its_arguments(changes: dict[str, torch.Tensor], message: str) -> None:
    arguments = {"x": torch.zeros(3, 96), "out": torch.zeros(3, 40)} | changes
    with pytest.raises(ValueError, match=re.escape(message)):
        native.linear_weight(matrix(40, 96)).apply(**arguments, num_threads=1)


def test_a_result_is_not_written_over_the_weights_or_the_rows() -> None:
    weight = matrix(40, 96)
    handle, before, both = native.linear_weight(weight), weight.clone(), torch.zeros(3, 136)
    with pytest.raises(ValueError, match="out must not overlap the weights"):
        handle.apply(torch.zeros(3, 96), weight[:3, :40], num_threads=1)
    with pytest.raises(ValueError, match="x and out must not overlap"):
        handle.apply(both[:, :96], both[:, 90:130], num_threads=1)
    assert torch.equal(weight, before)


# --- instruction sets -------------------------------------------------------------------------------------------------

ALL = f"""
import sys
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parent.parent)!r}]
import test_native_bf16 as test
print(test.native.isa())
for num_rows, num_columns in test.SHAPES[:6]:
    test.test_it_is_nearly_the_exact_product(num_rows, num_columns)
test.test_a_row_has_the_same_bits_at_every_row_count_and_number_of_threads()
test.test_an_output_has_the_same_bits_in_every_matrix()
test.test_rows_that_are_taken_in_slices_have_the_same_bits()
test.test_what_is_no_number_spoils_its_own_row_alone(float("nan"), 40)
test.test_nothing_behind_the_weights_is_read(5, 96)
"""


@pytest.mark.parametrize("isa", native.available_isas())
def test_every_instruction_set_keeps_a_rows_bits(isa: str) -> None:
    environment = os.environ | {native.MAX_ISA_VARIABLE: isa}
    result = subprocess.run([sys.executable, "-c", ALL], capture_output=True, text=True, env=environment, check=False)
    assert (result.stdout.strip(), result.stderr, result.returncode) == (isa, "", 0)
