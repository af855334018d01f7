"""Writes the weights of a model in a `weights_format`, quantised matrices packed for the kernels.

model.safetensors    plain tensors, and packed matrices as `[tiles, tile bytes]` uint8
packed.json          the format of each packed matrix, by its tensor's name
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch

from kvist.errors import ModelFileError
from kvist.kernels.weight_codec import GGUF_TYPES, TILE_ROWS, WeightCodes, gguf_codes, pack, quantise, widened
from kvist.loading.checkpoint import Checkpoint
from kvist.loading.progress import Progress
from kvist.loading.safetensors_writer import TensorSpec, write_safetensors
from kvist.loading.untrusted_file import FETCH_AGAIN, read_json, write_json
from kvist.loading.weights_plan import KeptWeight

PACKED = "packed.json"

# Weights quantised at once: enough for PyTorch, few enough that the float32 in between stays small.
_WEIGHTS_AT_ONCE = 1 << 19


def write_weights(
    directory: Path,
    checkpoint: Checkpoint,
    names: Mapping[str, str],
    plan: Mapping[str, KeptWeight],
    stage: str,
    progress: Progress,
) -> None:
    """Write all weights of a model into a directory. Memory stays at a few MB besides mapped files.

    Args:
        directory: where to.
        checkpoint: where they come from.
        names: the checkpoint's tensor for each parameter.
        plan: how each parameter is kept.
        stage: what `progress` is told, with the bytes that are written.

    Raises:
        OSError: the directory cannot take them.
    """
    total, done = require_room(directory, plan), 0

    def written(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        progress(stage, done, total)

    written(0)
    kept = {tensor_name: plan[name] for name, tensor_name in names.items()}
    specs = {name: weight.spec for name, weight in kept.items()}
    packed = {name: weight.storage for name, weight in kept.items() if weight.packed is not None}

    def parts(name: str) -> Iterable[torch.Tensor]:
        return _tiles(checkpoint, name, kept[name]) if name in packed else _plain(checkpoint, name, specs[name])

    write_safetensors(directory / "model.safetensors", specs, parts, written)
    if packed:
        write_json(directory / PACKED, packed)


def require_room(directory: Path, plan: Mapping[str, KeptWeight]) -> int:
    """The bytes of all weights; `OSError` where the directory has fewer left."""
    total = sum(kept.spec.num_bytes for kept in plan.values())
    if (free := shutil.disk_usage(directory).free) < total:
        raise OSError(f"it needs {total / 1e6:.0f} MB and {free / 1e6:.0f} MB are free")
    return total


def read_packed(directory: Path) -> dict[str, str]:
    """The format of each packed matrix in a directory, by its tensor's name; none where there are none."""
    path = directory / PACKED
    if not path.is_file():
        return {}
    packed = read_json(path)
    if not all(isinstance(storage, str) for storage in packed.values()):
        raise ModelFileError(f"{path} does not name formats: {FETCH_AGAIN}")
    return {str(name): str(storage) for name, storage in packed.items()}


def _plain(checkpoint: Checkpoint, name: str, spec: TensorSpec) -> Iterator[torch.Tensor]:
    if len(spec.shape) != 2:
        yield checkpoint.read(name, spec.dtype).flatten()
        return
    for first, stop in _row_ranges(spec.shape):
        yield checkpoint.rows(name, first, stop).to(spec.dtype).flatten()


def _tiles(checkpoint: Checkpoint, name: str, kept: KeptWeight) -> Iterator[torch.Tensor]:
    """The tiles of a packed matrix, some at a time."""
    stored = checkpoint.codes(name)
    for first, stop in _row_ranges(kept.shape):
        if stored is not None and stored.ggml_type in GGUF_TYPES:
            codes = _in_format(gguf_codes(stored.blocks[first:stop].numpy(), stored.ggml_type), kept.storage)
        else:
            codes = quantise(checkpoint.rows(name, first, stop), kept.storage)
        yield pack(codes).data


def _in_format(codes: WeightCodes, storage: str) -> WeightCodes:
    """Stored codes as they are, or in wider codes, where the format has room for them."""
    if codes.kind.name == storage:
        return codes
    if (codes.kind.name, storage) == ("int4", "int8"):
        return widened(codes)
    return quantise(codes.decode(), storage)


def _row_ranges(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Whole tiles of rows."""
    num_rows, num_columns = shape
    step = max(1, _WEIGHTS_AT_ONCE // (num_columns * TILE_ROWS)) * TILE_ROWS
    for first in range(0, num_rows, step):
        yield first, min(first + step, num_rows)
