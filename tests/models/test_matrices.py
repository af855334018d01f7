"""Packed matrices and those in bf16 go where their module goes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

from kvist.kernels.weight_codec import decode, pack, quantise
from kvist.models.matrices import QuantisedLinear, TokenEmbedding, WideEmbedding, WideLinear, wide_module


def made_linear() -> QuantisedLinear:
    generator = torch.Generator().manual_seed(0)
    weights = pack(quantise(torch.randn(48, 64, generator=generator), "int8"))
    return QuantisedLinear(weights, torch.randn(48, generator=generator))


def random_rows(count: int, num_columns: int = 64) -> torch.Tensor:
    return torch.randn(count, num_columns, generator=torch.Generator().manual_seed(1))


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


# --- weights in bf16 --------------------------------------------------------------------------------------------------


def made_wide(num_columns: int = 64) -> WideLinear:
    """With gradients, as a module is before it is loaded."""
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(num_columns, 48)
    linear.weight = nn.Parameter(torch.randn(48, num_columns, generator=generator).bfloat16())
    linear.bias = nn.Parameter(torch.randn(48, generator=generator))
    wide = wide_module(linear)
    assert isinstance(wide, WideLinear)
    return wide


def exact(linear: WideLinear, x: torch.Tensor) -> torch.Tensor:
    return (x.double() @ linear.weight.double().T + linear.bias.double()).detach()


def test_bf16_weights_meet_all_digits_of_the_rows_and_a_row_is_the_same_among_others() -> None:
    linear, x = made_wide(), random_rows(21)
    with torch.no_grad():
        y = linear(x)
        assert y.dtype == torch.float32
        assert (y - exact(linear, x)).norm() < 1e-6 * y.norm()
        assert torch.equal(torch.cat([linear(row.unsqueeze(0)) for row in x]), y)
        assert torch.equal(linear(x.view(3, 7, 64)), y.view(3, 7, 48))
        assert torch.equal(linear(x[3]), y[3])
        assert torch.equal(linear(x.T.contiguous().T), y)
        in_bf16 = linear(x.bfloat16())
        assert in_bf16.dtype == torch.bfloat16
        assert (in_bf16 - exact(linear, x.bfloat16())).norm() < 0.01 * y.norm()


@pytest.mark.parametrize("of", ["weights", "rows"])
def test_gradients_pass_a_product_with_bf16_weights(of: str) -> None:
    linear, x = made_wide(), random_rows(5)
    linear.requires_grad_(of == "weights")
    x.requires_grad_(of == "rows")
    y = linear(x)
    assert (y - exact(linear, x)).norm() < 0.01 * y.norm()
    y.sum().backward()
    if of == "weights":
        wanted, expected = linear.weight.grad, x.detach().sum(0).expand(48, 64)
    else:
        wanted, expected = x.grad, linear.weight.float().sum(0).expand(5, 64)
    assert wanted is not None
    assert (wanted - expected).norm() < 0.02 * expected.norm()
    with torch.no_grad():
        assert not torch.equal(linear(x), y), "it took PyTorch's product where no gradient is wanted"


def test_a_bias_that_wants_gradients_gets_them() -> None:
    linear = made_wide()
    linear.weight.requires_grad_(False)
    linear(random_rows(5)).sum().backward()
    assert torch.equal(linear.bias.grad, torch.full((48,), 5.0))


def test_products_that_the_library_does_not_make_are_pytorchs() -> None:
    with torch.no_grad():
        for linear, x in (
            (made_wide(40), random_rows(5, 40)),
            (made_wide(), random_rows(5).double()),
            (made_wide().to(torch.float16), random_rows(5)),
        ):
            assert (linear(x) - exact(linear, x)).norm() < 0.01 * exact(linear, x).norm()
    assert made_wide(40).native is None
    assert made_wide().to("meta").native is None
    assert made_wide().to("meta")(torch.empty(2, 64, device="meta")).shape == (2, 48)


def test_weights_in_bf16_that_are_replaced_are_other_weights() -> None:
    linear, x = made_wide().requires_grad_(False), random_rows(3)
    handle, other = linear.native, made_wide().weight.detach().flip(0)
    assert linear.native is handle
    linear.weight.data = other
    assert (linear(x) - exact(linear, x)).norm() < 1e-6 * exact(linear, x).norm()
    linear.weight = nn.Parameter(other.clone()[:16], requires_grad=False)
    linear.bias = None
    assert linear(x).shape == (3, 16)
    linear.weight.data = linear.weight.data[:8]
    assert linear(x).shape == (3, 8)
    linear.load_state_dict({"weight": torch.ones(8, 64)})
    assert torch.equal(linear(torch.ones(1, 64)), torch.full((1, 8), 64.0))
    assert torch.equal(pickle.loads(pickle.dumps(linear))(x), linear(x))
    assert torch.equal(copy.deepcopy(linear)(x), linear(x))


def test_a_table_of_vectors_in_bf16_gives_vectors_and_logits() -> None:
    table = TokenEmbedding(48, 64).requires_grad_(False)
    table.weight = nn.Parameter(made_wide().weight.detach(), requires_grad=False)
    wide, x = wide_module(table), random_rows(3)
    assert isinstance(wide, WideEmbedding)
    assert torch.equal(wide(torch.tensor([5, 0])), table.weight[[5, 0]].float())
    logits = x.double() @ table.weight.double().T
    assert (wide.product(x) - logits).norm() < 1e-6 * logits.norm()
