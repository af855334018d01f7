from __future__ import annotations

import pytest
import torch

from kvist.bench import peak
from kvist.bench.peak import PeakProducts

SIZES = ((32, 64, 48), (96, 32, 32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_no_product_is_faster_than_the_peak(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []
    measured = peak._flop_per_s

    def spy(flop: float, product: object) -> float:
        rates.append(measured(flop, product))  # type: ignore[arg-type]
        return rates[-1]

    monkeypatch.setattr(peak, "_flop_per_s", spy)
    products = PeakProducts(dtype, SIZES)
    assert products.flop_per_s == 0
    for _ in range(3):
        products.measure()
        assert products.flop_per_s == max(rates) > 0


@pytest.mark.parametrize(("dtype", "forms"), [(torch.bfloat16, 3), (torch.int8, 2)])
def test_all_layouts_of_all_sizes_are_tried_and_the_fastest_repeated(dtype, forms: int, monkeypatch) -> None:
    products = PeakProducts(dtype, SIZES)
    turns: list[list[float]] = []

    def told(flop: float, product: object) -> float:
        """The last product of a turn is the fastest."""
        turns[-1].append(flop)
        return 1e9 + len(turns[-1])

    monkeypatch.setattr(peak, "_flop_per_s", told)
    for _ in range(3):
        turns.append([])
        products.measure()
    first, second = (2.0 * rows * columns * out for rows, columns, out in SIZES)
    assert turns[0] == [first] * forms + [second] * forms
    assert [len(turn) for turn in turns[1:]] == [3, 3]
    assert turns[1][:2] == [second, second]
    assert products.flop_per_s == 1e9 + 2 * forms


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_all_forms_compute_the_same_product(dtype: torch.dtype) -> None:
    given = [product() for _, product in peak._products(dtype, (32, 64, 48))]
    assert given[0].shape == (32, 48)
    assert given[0].float().std() > 1e3
    assert all(torch.equal(given[0], other) for other in given[1:])


def test_among_the_sizes_are_square_ones_and_those_of_layers() -> None:
    assert {(size, size, size) for size in (512, 1024, 2048, 4096)} <= set(peak.SIZES)
    assert any(len(set(size)) > 1 for size in peak.SIZES)
