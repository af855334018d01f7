"""Packed matrices go where their module goes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch

from kvist.kernels.weight_codec import decode, pack, quantise
from kvist.models.matrices import QuantisedLinear


def made_linear() -> QuantisedLinear:
    generator = torch.Generator().manual_seed(0)
    weights = pack(quantise(torch.randn(48, 64, generator=generator), "int8"))
    return QuantisedLinear(weights, torch.randn(48, generator=generator))


def test_a_packed_matrix_that_is_moved_is_multiplied_where_it_lies() -> None:
    linear = made_linear()
    assert linear.native is not None

    linear.to("meta")
    assert linear.native is None
    assert linear.packed.data.device.type == "meta"
    assert linear.bias is not None
    assert linear.bias.device.type == "meta"
    assert linear(torch.empty(2, 64, device="meta")).device.type == "meta"


def test_a_bias_takes_the_dtype_of_its_model_and_stays_with_its_matrix() -> None:
    linear, x = made_linear(), torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    expected = linear(x)
    linear.to(torch.bfloat16)
    assert linear.bias is not None
    assert linear.bias.dtype == torch.bfloat16
    torch.testing.assert_close(linear(x.bfloat16()).float(), expected, rtol=0.02, atol=0.1)
    assert not linear.state_dict(), "a bias without its matrix is half of a layer"


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda linear: pickle.loads(pickle.dumps(linear))])
def test_a_packed_matrix_is_copied_with_its_bytes(copied: Callable[[QuantisedLinear], QuantisedLinear]) -> None:
    linear, x = made_linear(), torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    expected, other = linear(x), copied(linear)
    linear.data.zero_()
    assert not torch.equal(linear(x), expected)
    assert torch.equal(other(x), expected)


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
    linear.data.data = first.data
    assert torch.equal(linear(x), before)
