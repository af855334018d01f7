"""What is found out about PyTorch's products in bf16."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvist.kernels import plain_linear
from kvist.kernels.plain_linear import bf16_rows_keep_their_bits


@pytest.fixture(autouse=True)
def _tried_anew() -> Iterator[None]:
    bf16_rows_keep_their_bits.cache_clear()
    yield
    bf16_rows_keep_their_bits.cache_clear()


def test_products_that_round_a_row_otherwise_among_others_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    product = plain_linear.product

    def rounding(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = product(x, weight)
        return y * (1 + 2**-7) if len(x) == 7 else y

    monkeypatch.setattr(plain_linear, "product", rounding)
    assert not bf16_rows_keep_their_bits()


def test_products_that_do_not_are_not_and_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []

    def exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        counts.append(len(x))
        return (x.double() @ weight.double().T).bfloat16()

    monkeypatch.setattr(plain_linear, "product", exact)
    assert bf16_rows_keep_their_bits()
    assert bf16_rows_keep_their_bits()
    assert set(counts) == {1, 2, 3, 7, 16, 33, 64}
    assert len(counts) == 3 * 8
