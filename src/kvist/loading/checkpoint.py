"""A checkpoint: the named tensors of a model, whatever file they come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

# Plain numbers, as GGUF and safetensors files name them alike.
PLAIN_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class StoredCodes:
    """A tensor as a GGUF file stores it: quantised blocks, not yet de-quantised.

    Attributes:
        ggml_type: name of the block format, e.g. `Q4_1`.
        shape: `(rows, columns)` of the de-quantised tensor.
        blocks: `[rows, bytes per row]` uint8, mapped from the file, rows in Hugging Face order.
    """

    ggml_type: str
    shape: tuple[int, ...]
    blocks: torch.Tensor


class Checkpoint(Protocol):
    """Tensors under their Hugging Face names (`model.layers.0.self_attn.q_proj.weight`), in Hugging Face row order."""

    def names(self) -> list[str]:
        """All tensor names."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The tensor in `dtype`, uint8 for a packed matrix; mapped from the file where that needs no conversion."""

    def rows(self, name: str, first: int, stop: int) -> torch.Tensor:
        """Rows `first` to `stop` (exclusive) of a matrix, `[stop - first, columns]` float32."""

    def block_type(self, name: str) -> str | None:
        """The GGUF block type of a tensor; None where it is stored as plain numbers."""

    def codes(self, name: str) -> StoredCodes | None:
        """The stored quantised blocks; None where the tensor is stored as plain numbers."""
