from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from kvist.bench import products
from kvist.bench.products import MatrixShape, RepeatedProduct, product_rows
from kvist.errors import OptionError
from kvist.kernels.linear import linear
from kvist.kernels.weight_codec import pack, quantise

SHAPE = MatrixShape(48, 64)
ALL = ("int8", "int4", "int4_min", "bf16")


@pytest.fixture(autouse=True)
def _few_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_LEAST_COPIES_BYTES", 1 << 14)
    monkeypatch.setattr(products, "last_level_cache_bytes", lambda: 1 << 13)


def measured(rows: Sequence[int], formats: Sequence[str] = ALL) -> list[products.ProductRow]:
    return product_rows(SHAPE, rows, formats, 1, lambda: 2e10)


def test_every_format_stands_beside_those_of_pytorch() -> None:
    rows = measured((1, 4))
    names = [*ALL, "PyTorch bf16", "PyTorch _int_mm"]
    assert [(row.name, row.rows) for row in rows] == [(name, count) for name in names for count in (1, 4)]
    for row in rows:
        assert row.gb_per_s == pytest.approx(row.weights_bytes / row.seconds / 1e9)
        assert row.roofline_fraction == pytest.approx(row.gb_per_s / 20)
        assert row.gop_per_s == pytest.approx(2 * 48 * 64 * row.rows / row.seconds / 1e9)
    of_one = {row.name: row.seconds for row in rows if row.rows == 1}
    assert all(row.ratio_to_one == pytest.approx(row.seconds / of_one[row.name]) for row in rows)
    sizes = {row.name: row.weights_bytes for row in rows}
    assert sizes == {
        # Per group of 32: the codes and their step, and a minimum.
        "int8": 48 * 2 * 34,
        "int4": 48 * 2 * 18,
        "int4_min": 48 * 2 * 20,
        "bf16": 48 * 64 * 2,
        "PyTorch bf16": 48 * 64 * 2,
        "PyTorch _int_mm": 48 * 64,
    }


def test_without_one_row_there_is_no_ratio_to_it() -> None:
    assert {row.ratio_to_one for row in measured((2, 3), ("int8",))} == {None}


def test_a_product_that_pytorch_does_not_have_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> torch.Tensor:
        raise RuntimeError("not implemented for 'Char'")

    monkeypatch.setattr(torch, "_int_mm", missing)
    assert [row.name for row in measured((1,), ("int8",))] == ["int8", "PyTorch bf16"]


@pytest.mark.parametrize("name", ALL)
def test_what_is_timed_is_the_product_with_every_copy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[torch.Tensor] = []
    monkeypatch.setattr(products.native, "capsule", lambda x: given.append(x) or torch.to_dlpack(x))
    weights = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    weight = weights.bfloat16() if name == "bf16" else pack(quantise(weights, name))
    copies = products._num_copies(weight.data.nbytes)
    assert copies * weight.data.nbytes > 1 << 14
    timed = products._native(weight)(3)
    assert timed is not None
    for index in (0, copies - 1):
        given.clear()
        assert timed([index]) > 0
        x, y = given
        if isinstance(weight, torch.Tensor):
            torch.testing.assert_close(y, x @ weight.float().T)
        else:
            assert torch.equal(y, linear(x, weight))
        y.zero_()


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "linear"), (torch.int8, "_int_mm")])
def test_the_products_of_pytorch_meet_the_copies_in_turn(dtype: torch.dtype, name: str) -> None:
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def product(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        seen.append((x, matrix))
        return x

    matrix = torch.ones((64, 48) if dtype == torch.int8 else (48, 64), dtype=dtype)
    timed = products._pytorch(matrix, product)(2)
    assert timed is not None
    timed([0, 1])
    assert all((x.shape, x.dtype) == ((2, 64), dtype) for x, _ in seen)
    assert len({copy.data_ptr() for _, copy in seen}) == 2


def test_runs_go_on_with_the_next_copies() -> None:
    runs: list[Sequence[int]] = []

    def timed(indices: Sequence[int]) -> float:
        runs.append(indices)
        return 6.0

    product = RepeatedProduct(timed, num_copies=5, num_products=3)
    assert [product.run().seconds for _ in range(3)] == [2.0] * 3
    assert runs == [[0, 1, 2], [3, 4, 0], [1, 2, 3]]


def test_many_rows_take_fewer_products_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers: list[int] = []
    made = RepeatedProduct.__init__

    def spy(self: RepeatedProduct, timed: Callable[[Sequence[int]], float], copies: int, count: int) -> None:
        numbers.append(count)
        made(self, timed, copies, count)

    monkeypatch.setattr(RepeatedProduct, "__init__", spy)
    monkeypatch.setattr(products, "_MOST_FLOP", 2 * 48 * 64 * 8.5)
    measured((1, 8, 20), ("int8",))
    assert numbers[:3] == [(1 << 14) // (48 * 68) + 1, 2, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1536", "shapes has '1536': write rows and columns of a matrix like 1536x576"),
        ("0x64", "write rows and columns"),
        ("-4x64", "write rows and columns"),
        ("64x64x64", "write rows and columns"),
        ("64x40", "the columns, 40, must be a multiple of 32"),
    ],
)
def test_shapes_that_cannot_be_are_refused(text: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        MatrixShape.parse(text)


def test_more_than_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "available_bytes", lambda: 1000)
    with pytest.raises(OptionError, match="1,000 bytes are free: ask for fewer formats or smaller shapes"):
        measured((1,))
