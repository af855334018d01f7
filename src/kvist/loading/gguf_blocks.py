"""The block formats of GGUF tensors that are read. Sizes and arithmetic come from the `gguf` package."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from kvist.errors import ModelFileError, UnsupportedModelError

READABLE_TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")


@dataclass(frozen=True)
class BlockType:
    """`block_bytes` bytes hold `block_values` consecutive values of a row."""

    name: str
    block_values: int
    block_bytes: int

    @property
    def quantised(self) -> bool:
        return self.block_values > 1


@cache
def block_type(type_id: int) -> BlockType:
    """The block format with this number in a GGUF file; those that are not read are refused by name."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        known = GGMLQuantizationType(type_id)
    except ValueError:
        raise ModelFileError(f"tensor type {type_id} is unknown: readable are {', '.join(READABLE_TYPES)}") from None
    if known.name not in READABLE_TYPES:
        raise UnsupportedModelError(
            f"tensor type {known.name} is not supported: readable are {', '.join(READABLE_TYPES)}; "
            "get the model in one of them"
        )
    values, size = GGML_QUANT_SIZES[known]
    return BlockType(known.name, values, size)


def dequantise(blocks: npt.NDArray[np.uint8], name: str) -> npt.NDArray[np.float32]:
    """The values of `[rows, bytes per row]` blocks of type `name`, as `[rows, columns]` float32."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    # A scale that is not a number is the file's affair; it must not become a warning on the user's screen.
    with np.errstate(all="ignore"):
        return dequantize(blocks, GGMLQuantizationType[name])
