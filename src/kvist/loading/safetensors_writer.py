"""Writes a safetensors file in small parts, so that no tensor need lie in memory whole."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from kvist.loading.checkpoint import PLAIN_DTYPES

_DTYPE_NAMES = {dtype: name for name, dtype in PLAIN_DTYPES.items()}

# Tensors whose size is a multiple of this come first and so all start at one: kernels read whole cache lines.
_ALIGNMENT = 64


def write_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    parts: Callable[[str], Iterable[torch.Tensor]],
    written: Callable[[int], None],
) -> None:
    """Write all tensors of `shapes` in `dtype`.

    Args:
        path: the file to make.
        shapes: the shape of each tensor.
        dtype: float32 or bfloat16.
        parts: gives a tensor's values in `dtype`, flat and in order, some at a time.
        written: called with the bytes of each part.
    """
    sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
    order = sorted(shapes, key=lambda name: sizes[name] % _ALIGNMENT != 0)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in order:
        header[name] = {
            "dtype": _DTYPE_NAMES[dtype],
            "shape": list(shapes[name]),
            "data_offsets": [offset, offset + sizes[name]],
        }
        offset += sizes[name]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            left = sizes[name]
            for part in parts(name):
                data = part.contiguous().view(torch.uint8).numpy()
                file.write(data.data)
                left -= data.nbytes
                written(data.nbytes)
            if left:
                raise ValueError(f"{name}: its parts differ from its shape by {left} bytes")
