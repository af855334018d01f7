"""In which form each weight of a model is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from kvist.kernels.weight_codec import GROUP_COLUMNS, TILE_ROWS, WEIGHT_FORMATS, WeightFormat
from kvist.loading.safetensors_writer import TensorSpec
from kvist.models.decoder import Decoder

WEIGHT_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
"""The formats that are plain numbers."""

# The format nearest to a GGUF block type. Codes of the first four types are kept as they are, those of Q4_K with their
# steps and minima in fp16; the others are rounded again, to more bits than they had.
_NEAREST = {
    "Q4_0": "int4", "Q4_1": "int4_min", "Q5_0": "int8", "Q8_0": "int8",
    "Q4_K": "int4_min", "Q5_1": "int8", "Q5_K": "int8", "Q6_K": "int8",
}  # fmt: skip


_OUTER = ("embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True)
class KeptWeight:
    """A parameter as it is kept.

    Attributes:
        shape: of the parameter.
        storage: a plain format, or one of `WEIGHT_FORMATS`.
    """

    shape: tuple[int, ...]
    storage: str

    @property
    def packed(self) -> WeightFormat | None:
        """The format of a packed matrix; None where these are plain numbers."""
        return WEIGHT_FORMATS.get(self.storage)

    @property
    def spec(self) -> TensorSpec:
        """The tensor that holds it."""
        if self.packed is None:
            return TensorSpec(self.shape, WEIGHT_DTYPES[self.storage])
        num_rows, num_columns = self.shape
        return TensorSpec((-(-num_rows // TILE_ROWS), self.packed.tile_bytes(num_columns)), torch.uint8)


def takes(storage: str, shape: tuple[int, ...]) -> bool:
    """Whether a format of packed matrices takes a parameter of such a shape."""
    return storage in WEIGHT_FORMATS and len(shape) == 2 and shape[1] % GROUP_COLUMNS == 0


def unfitting(plan: Mapping[str, KeptWeight]) -> tuple[str, ...]:
    """The matrices that are plain since no format of packed matrices takes their columns."""
    return tuple(
        name
        for name, kept in plan.items()
        if len(kept.shape) == 2 and not takes(next(iter(WEIGHT_FORMATS)), kept.shape)
    )


def stored_plan(decoder: Decoder, names: Mapping[str, str], packed: Mapping[str, str]) -> dict[str, KeptWeight]:
    """How a prepared copy in a quantised format keeps each parameter.

    Args:
        names: the copy's tensor for each parameter.
        packed: the format of those that are packed, as the copy lists them.
    """
    return {
        name: KeptWeight(tuple(parameter.shape), packed.get(names[name], "bf16" if parameter.dim() == 2 else "fp32"))
        for name, parameter in decoder.named_parameters()
    }


def weights_plan(
    decoder: Decoder, weights_format: str, block_type: Callable[[str], str | None] = lambda _: None
) -> dict[str, KeptWeight]:
    """How each parameter of a decoder is kept.

    Vectors are fp32. Matrices are fp32, bf16 or quantised; where they are quantised, those whose columns are no
    multiple of 32 are bf16. `int4` is for the matrices of layers: the table of token
    vectors and the output matrix are int8, since every logit hangs on them. `gguf` is what the file holds, matrix by
    matrix.

    Args:
        decoder: its weights need no memory.
        weights_format: one of `WEIGHTS_FORMATS`.
        block_type: the GGUF block type of a parameter; None for plain numbers.
    """
    return {
        name: KeptWeight(tuple(parameter.shape), _storage(name, parameter, weights_format, block_type(name)))
        for name, parameter in decoder.named_parameters()
    }


def _storage(name: str, parameter: torch.Tensor, weights_format: str, block_type: str | None) -> str:
    if weights_format == "fp32" or parameter.dim() != 2:
        return "fp32"
    if weights_format == "bf16" or parameter.shape[1] % GROUP_COLUMNS:
        return "bf16"
    nearest = None if block_type is None else _NEAREST[block_type]
    if weights_format == "gguf":
        return nearest or "bf16"
    if weights_format == "int8" or name in _OUTER:
        return "int8"
    # Of the two formats of 4 bits the one with a minimum: half a bit more, and much closer.
    return nearest if nearest == "int4" else "int4_min"
