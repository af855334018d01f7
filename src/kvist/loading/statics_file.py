"""The statics of a model's quantised keys, computed once and kept in the cache folder.

    statics/<hash of the model's files>-<weights_format>-<hash of text and recipe>.safetensors
        layers.<n>.offset  layers.<n>.scale  layers.<n>.feedback  layers.<n>.frequencies       float32

They are kept since they decide what a page's bytes mean: the sums behind them end in other bits on another machine.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from kvist.config import LayerConfig
from kvist.errors import OptionError
from kvist.kernels.key_statics import KeyStatics
from kvist.loading.cache_folder import cache_folder, make_folder, move_into_place, only_process
from kvist.loading.fingerprint import STATIC_NAMES, statics_hash
from kvist.loading.key_calibration import feedback_dims
from kvist.loading.progress import Progress

_FOLDER = "statics"


def kept_statics(
    name: str,
    layers: Sequence[LayerConfig],
    compute: Callable[[], tuple[KeyStatics, ...]],
    progress: Progress,
) -> tuple[KeyStatics, ...]:
    """The statics of a model's layers, read if they are kept, else computed and kept, by one process at a time.

    Where the cache folder cannot be written they are computed all the same, and a warning says so.

    Args:
        name: what they are kept under.
        layers: of the model.
        compute: computes them.
        progress: told that another process is waited for.
    """
    path = cache_folder() / _FOLDER / f"{name}.safetensors"
    if (kept := read_statics(path, layers)) is not None:
        return kept
    with _workplace(path, progress) as work:
        if (kept := read_statics(path, layers)) is not None:  # another process made them meanwhile
            return kept
        statics = compute()
        if work is not None:
            _keep(statics, work / path.name, path)
    return statics


def read_statics(path: Path, layers: Sequence[LayerConfig]) -> tuple[KeyStatics, ...] | None:
    """What a file holds, if it is whole and belongs to such layers."""
    shapes = _shapes(layers)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if set(file.keys()) != shapes.keys():
                return None
            # Copies: the file may go away while they are in use.
            tensors = {name: file.get_tensor(name).clone() for name in shapes}
    except (OSError, SafetensorError):
        return None
    if any(tensors[name].shape != shape or tensors[name].dtype != torch.float32 for name, shape in shapes.items()):
        return None
    statics = tuple(
        KeyStatics(**{name: tensors[f"layers.{layer}.{name}"] for name in STATIC_NAMES}) for layer in range(len(layers))
    )
    sound = all(tensor.isfinite().all() for tensor in tensors.values()) and all((s.scale > 0).all() for s in statics)
    return statics if sound and metadata.get("hash") == statics_hash(statics) else None


def _shapes(layers: Sequence[LayerConfig]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for index, layer in enumerate(layers):
        heads, dims, block = layer.num_kv_heads, layer.head_dim, feedback_dims(layer.head_dim)
        shapes |= {
            f"layers.{index}.offset": (heads, dims),
            f"layers.{index}.scale": (heads, dims),
            f"layers.{index}.feedback": (heads, dims // block, block, block),
            f"layers.{index}.frequencies": (dims // 2,),
        }
    return shapes


@contextmanager
def _workplace(path: Path, progress: Progress) -> Iterator[Path | None]:
    """An empty folder to make a file in, alone among processes; None, with a warning, where there can be none."""
    with ExitStack() as stack:
        work = None
        try:
            make_folder(_FOLDER)
            work = stack.enter_context(only_process(path, progress))
        except (OptionError, OSError) as error:
            _warn(error)
        yield work


def _keep(statics: Sequence[KeyStatics], made: Path, path: Path) -> None:
    tensors = {
        f"layers.{layer}.{name}": getattr(values, name).cpu().contiguous()
        for layer, values in enumerate(statics)
        for name in STATIC_NAMES
    }
    try:
        made.write_bytes(save(tensors, {"hash": statics_hash(statics)}))
        move_into_place(made, path)
    except OSError as error:
        _warn(error)


def _warn(error: Exception) -> None:
    reason = (error.strerror if isinstance(error, OSError) else None) or error
    warnings.warn(
        f"the statics of the model's quantised keys are not kept, so each start computes them again: {reason}",
        RuntimeWarning,
        stacklevel=2,
    )
