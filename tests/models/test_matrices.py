"""Packed matrices go where their module goes."""

from __future__ import annotations

import torch

from kvist.kernels.weight_codec import decode, pack, quantise
from kvist.models.matrices import QuantisedLinear


def test_a_packed_matrix_that_is_moved_is_multiplied_where_it_lies() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = quantise(torch.randn(48, 64, generator=generator), "int8")
    linear = QuantisedLinear(pack(weights))
    assert linear.native is not None

    linear.to("meta")
    assert linear.native is None
    assert linear.packed.data.device.type == "meta"


def test_a_packed_matrix_whose_bytes_are_replaced_is_another_matrix() -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = (pack(quantise(torch.randn(48, 64, generator=generator), "int8")) for _ in range(2))
    linear, x = QuantisedLinear(first), torch.randn(3, 64, generator=generator)
    before, handle = linear(x), linear.native
    assert linear.native is handle
    linear.data = second.data
    assert torch.equal(linear(x), QuantisedLinear(second)(x))
    assert not torch.equal(linear(x), before)
    assert torch.equal(decode(linear.packed), decode(second))
