"""The matrices of a decoder in the forms in which their weights are kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn

from kvist.kernels import linear, native
from kvist.kernels.native_types import LinearWeight
from kvist.kernels.plain_linear import Linear, product
from kvist.kernels.weight_codec import GROUP_COLUMNS, QuantisedWeight, decode_rows


class TokenEmbedding(nn.Embedding):
    """The table of token vectors, which is the output matrix too where both are tied."""

    def product(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[S, V]` from hidden states `[S, E]`."""
        return product(hidden, self.weight)


class NativeMatrix(nn.Module):
    """A matrix `[N, K]` that the native library multiplies with where it can, in the memory where it lies."""

    # With the place that it was made of; it keeps that memory, so that nothing else comes to lie there.
    _made: tuple[tuple[int, ...], LinearWeight] | None = None

    @property
    def native(self) -> LinearWeight | None:
        """The matrix for the native library; None where that does not multiply with it."""
        stored = self._stored()
        if stored is None:
            return None
        place, made = (stored.data_ptr(), *stored.shape), self._made
        if made is None or made[0] != place:
            self._made = made = place, native.linear_weight(self._weight())
        return made[1]

    def _stored(self) -> torch.Tensor | None:
        """The memory that the library reads; None where it cannot."""
        raise NotImplementedError

    def _weight(self) -> QuantisedWeight | torch.Tensor:
        """The matrix in that memory."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        self._made = None
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call, no-any-return]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_made": None}


def _native_product(handle: LinearWeight, x: torch.Tensor, num_rows: int) -> torch.Tensor:
    """`x @ W.T`, `[..., N]` in the dtype of `x` `[..., K]`, float32 or bfloat16."""
    out = x.new_empty(*x.shape[:-1], num_rows)
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    handle.apply(native.capsule(rows), native.capsule(out.view(-1, num_rows)), num_threads=torch.get_num_threads())
    return out


class _WideMatrix(NativeMatrix):
    """Weights in fewer digits than what is computed with them.

    bf16 on the CPU meets the digits of the rows in the native library. What that has no product for is rounded to the
    weights' dtype and multiplied by PyTorch: other dtypes and devices, and what wants gradients.
    """

    weight: torch.Tensor

    def _stored(self) -> torch.Tensor | None:
        return self.weight if is_native(self.weight) else None

    def _weight(self) -> torch.Tensor:
        return self.weight

    def _wide_product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        wants_gradients = torch.is_grad_enabled() and (x.requires_grad or self.weight.requires_grad)
        handle = self.native if x.dtype in _ROW_DTYPES and not wants_gradients else None
        if handle is None:
            bias = None if bias is None else bias.to(self.weight.dtype)
            return product(x.to(self.weight.dtype), self.weight, bias).to(x.dtype)
        y = _native_product(handle, x, len(self.weight))
        return y if bias is None else y.add_(bias)


_ROW_DTYPES = (torch.float32, torch.bfloat16)


def is_native(weight: torch.Tensor) -> bool:
    """Whether the native library multiplies with plain weights."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and weight.is_contiguous()
        and weight.numel() > 0
        and weight.shape[1] % GROUP_COLUMNS == 0
    )


class WideLinear(_WideMatrix, Linear):
    """A linear layer whose input and result have more digits than its weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._wide_product(x, self.bias)


class WideEmbedding(_WideMatrix, TokenEmbedding):
    """A table of token vectors in fewer digits than what is computed with them, float32."""

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(token_ids).float()

    def product(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._wide_product(hidden)


class QuantisedMatrix(NativeMatrix):
    """A packed matrix `[N, K]`: what products with it are made of, native where it lies on the CPU."""

    def __init__(self, weight: QuantisedWeight) -> None:
        super().__init__()
        self.format, self.num_rows, self.num_columns = weight.format, weight.num_rows, weight.num_columns
        self.fine_rows = weight.fine_rows
        # Not a parameter: it is no matrix of numbers, and no gradient reaches it.
        self.data: torch.Tensor
        self.register_buffer("data", weight.data, persistent=False)

    @property
    def packed(self) -> QuantisedWeight:
        """The matrix, wherever it lies now."""
        return QuantisedWeight(self.format, self.num_rows, self.num_columns, self.data, self.fine_rows)

    def _stored(self) -> torch.Tensor | None:
        return self.data if self.data.device.type == "cpu" else None

    def _weight(self) -> QuantisedWeight:
        return self.packed

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """`x @ W.T`, `[T, N]` in the dtype of `x` `[T, K]`, float32 or bfloat16."""
        handle = self.native
        if handle is None:
            return linear.linear(x, self.packed)
        return _native_product(handle, x, self.num_rows)


class QuantisedLinear(QuantisedMatrix):
    """A linear layer with quantised weights."""

    def __init__(self, weight: QuantisedWeight, bias: torch.Tensor | None = None) -> None:
        super().__init__(weight)
        self.bias: torch.Tensor | None
        self.register_buffer("bias", bias, persistent=False)  # as the matrix

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.product(x)
        return y if self.bias is None else y.add_(self.bias)


class QuantisedEmbedding(QuantisedMatrix):
    """A table of quantised token vectors, and the output matrix where both are tied."""

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """`[T, E]` float32."""
        handle = self.native
        if handle is None:
            return decode_rows(self.packed, token_ids)
        out = torch.empty(len(token_ids), self.num_columns)
        handle.decode_rows(native.capsule(token_ids.contiguous()), native.capsule(out))
        return out


def has_fine_rows(name: str) -> bool:
    """Whether a module's product takes fine rows, by its name in the decoder.

    Logits and values do: they feel what rounding takes from a row the most, for what their products cost.
    """
    return name.rpartition(".")[2] in ("lm_head", "embed_tokens", "v_proj")


def quantised_module(module: nn.Module, weight: QuantisedWeight) -> nn.Module:
    """What takes the place of a matrix's module, with its bias, once its weights are packed."""
    if isinstance(module, TokenEmbedding):
        return QuantisedEmbedding(weight)
    return QuantisedLinear(weight, module.bias.detach() if isinstance(module.bias, torch.Tensor) else None)


def wide_module(module: nn.Module) -> nn.Module:
    """What takes the place of a matrix's module whose weights have fewer digits than what is computed with them."""
    wide: WideEmbedding | WideLinear
    with torch.device("meta"):
        if isinstance(module, TokenEmbedding):
            wide = WideEmbedding(module.num_embeddings, module.embedding_dim)
        else:
            assert isinstance(module, nn.Linear)
            wide = WideLinear(module.in_features, module.out_features, bias=module.bias is not None)
            wide.bias = module.bias
    wide.weight = module.weight
    return wide
