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
    order = in_order({name: spec.num_bytes for name, spec in tensors.items()})
    with path.open("wb") as file:
        file.write(
            file_start(
                {
                    name: (_DTYPE_NAMES[tensors[name].dtype], tensors[name].shape, tensors[name].num_bytes)
                    for name in order
                }
            )
        )
        for name in order:
            left = tensors[name].num_bytes
            for part in parts(name):
                data = part.contiguous().view(torch.uint8).numpy()
                file.write(data.data)
                left -= data.nbytes
                written(data.nbytes)
            if left:
                raise ValueError(f"{name}: its parts differ from its shape by {left} bytes")


def in_order(sizes: Mapping[str, int]) -> list[str]:
    """The order in which a file has tensors of these sizes in bytes."""
    return sorted(sizes, key=lambda name: sizes[name] % _ALIGNMENT != 0)


def file_start(tensors: Mapping[str, tuple[str, tuple[int, ...], int]]) -> bytes:
    """What a file has before its tensors, which follow in this order without gaps: dtype, shape and bytes of each."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype_name, shape, num_bytes) in tensors.items():
        header[name] = {"dtype": dtype_name, "shape": list(shape), "data_offsets": [offset, offset + num_bytes]}
        offset += num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
