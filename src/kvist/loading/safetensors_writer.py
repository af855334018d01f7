"""Writes a safetensors file in small parts, so that no tensor need lie in memory whole."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from kvist.loading.checkpoint import PLAIN_DTYPES

_DTYPE_NAMES = {dtype: name for name, dtype in PLAIN_DTYPES.items()} | {torch.uint8: "U8"}

# Tensors whose size is a multiple of this come first and so all start at one: kernels read whole cache lines.
_ALIGNMENT = 64


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that is to be written."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_safetensors(
    path: Path,
    tensors: Mapping[str, TensorSpec],
    parts: Callable[[str], Iterable[torch.Tensor]],
    written: Callable[[int], None],
) -> None:
    """Write all of `tensors`.

    Args:
        path: the file to make.
        tensors: shape and dtype of each.
        parts: gives a tensor's values in its dtype, in order, some at a time.
        written: called with the bytes of each part.
    """
    order = sorted(tensors, key=lambda name: tensors[name].num_bytes % _ALIGNMENT != 0)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in order:
        header[name] = {
            "dtype": _DTYPE_NAMES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [offset, offset + tensors[name].num_bytes],
        }
        offset += tensors[name].num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            left = tensors[name].num_bytes
            for part in parts(name):
                data = part.contiguous().view(torch.uint8).numpy()
                file.write(data.data)
                left -= data.nbytes
                written(data.nbytes)
            if left:
                raise ValueError(f"{name}: its parts differ from its shape by {left} bytes")
