"""The operations of the native library, one Python function each.

Importing this module asks nothing of the library, so that Kvist works without it up to the first call that needs it.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from kvist.config import check_threads
from kvist.errors import NativeError, OptionError
from kvist.kernels.caches import last_level_cache_bytes
from kvist.kernels.native_types import (
    DecoderLayer,
    HiddenRows,
    LayerCall,
    Library,
    LinearWeight,
    PageLayer,
    PageLayoutFields,
    PageStep,
)
from kvist.threads import wait_briefly

if TYPE_CHECKING:
    import torch

    from kvist.kernels.weight_codec import QuantisedWeight

MAX_ISA_VARIABLE = "KVIST_MAX_ISA"

# What the library takes; csrc/bindings.cpp holds to the same.
_MOST_PASSES = 1_000_000

# A machine's last-level cache keeps part of a buffer even where the buffer is larger: at four times its size, little.
_BUFFER_PER_CACHE = 4
_LEAST_BUFFER_BYTES = 256 * 2**20


def _module() -> Library:
    """The native library as it is, no instruction set chosen yet.

    Raises:
        NativeError: it was not built.
    """
    # PyTorch first: it brings an OpenMP runtime under the name that the native library asks for, so that the two share
    # one runtime and its threads. The other way round PyTorch would run on the system's, which may be too old for it.
    wait_briefly()
    import torch  # noqa: F401

    try:
        return cast("Library", importlib.import_module("kvist.kernels._native"))
    except ImportError as error:
        raise NativeError(
            f"the native library cannot be loaded ({error}): build it with 'pip install .' in Kvist's source folder, "
            "which takes GCC 11, Clang 12 or later and Python's headers"
        ) from error


@functools.cache
def _library() -> Library:
    """The native library, with the instruction set chosen.

    Raises:
        NativeError: it was not built, or has no instruction set that fits this CPU and `KVIST_MAX_ISA`.
    """
    library = _module()
    max_isa = os.environ.get(MAX_ISA_VARIABLE, "")
    try:
        library.choose_isa(max_isa)
    except ValueError:
        raise NativeError(
            f"{MAX_ISA_VARIABLE} is '{max_isa}': this build has {', '.join(library.built_isas())}; "
            "set it to one of these or leave it unset"
        ) from None
    except RuntimeError as error:
        raise NativeError(f"{error}: build Kvist on this machine") from None
    return library


def isa() -> str:
    """The instruction set in use: the richest of the build and this CPU, not above `KVIST_MAX_ISA` where that is set.

    Raises:
        NativeError: as for every function here, when the native library is missing or cannot run.
    """
    return _library().chosen_isa()


def available_isas() -> tuple[str, ...]:
    """The instruction sets that this build has and this CPU runs, from the plainest to the richest."""
    return tuple(_library().runnable_isas())


def read_rates(
    *, buffer_bytes: int | None = None, passes: int = 5, num_threads: int | None = None
) -> tuple[float, ...]:
    """How fast each of several passes over a fresh buffer read it, in bytes per second.

    Every thread reads a part of its own, which it was the first to touch, and each pass is checked to have read it all.

    Args:
        buffer_bytes: must exceed the last-level cache; by default it is four times as large, 256 MiB at least, and at
            most half of the memory that is free.
        passes: how often the buffer is read.
        num_threads: how many threads read; PyTorch's number by default.
    """
    num_threads = _threads(num_threads)
    _check_between("passes", passes, 1, _MOST_PASSES)
    return tuple(_library().read_rates(_buffer_bytes(buffer_bytes), passes, num_threads))


def _buffer_bytes(asked: int | None) -> int:
    """The size of the probe's buffer: what was asked for, if it is larger than the caches and fits into free memory."""
    import psutil

    cache_bytes = last_level_cache_bytes() or 0
    least = max(_LEAST_BUFFER_BYTES, cache_bytes + 1)
    most = int(psutil.virtual_memory().available) // 2
    if most < least:
        raise OptionError(
            f"measuring the read bandwidth takes a buffer of at least {least} bytes, larger than the caches, and half "
            f"of the free memory is {most}: free some"
        )
    if asked is None:
        return min(max(least, _BUFFER_PER_CACHE * cache_bytes), most)
    if not least <= asked <= most:
        raise OptionError(
            f"buffer_bytes is {asked}: it must be from {least}, more than the caches hold, to {most}, half of the free "
            "memory"
        )
    return asked


def _threads(num_threads: int | None) -> int:
    if num_threads is None:
        import torch

        # Said with every call: a thread that has called nothing yet would otherwise get libgomp's own default.
        return torch.get_num_threads()
    return check_threads("num_threads", num_threads)


def _check_between(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise OptionError(f"{name} is {value}: it must be from {least} to {most}")


# --- the bytes of a page: csrc/page_layout.h, read through the library so that they stand in one place ----------------


def page_layout() -> PageLayoutFields:
    """The constants of the page layout and its storage formats. No instruction set is needed for it, or chosen."""
    return _module().page_layout()


def takes_head_dim(storage_format: str, head_dim: int) -> bool:
    """Whether heads of this size can be stored so."""
    return _module().takes_head_dim(storage_format, head_dim)


def group_dims(storage_format: str, head_dim: int) -> int:
    """The dims of a head that share scalars."""
    return _module().group_dims(storage_format, head_dim)


def head_layout(keys: str, values: str, head_dim: int) -> tuple[int, int, int, int, int]:
    """Where a KV head's key codes, key scales, value codes and value scales start in it, and its bytes."""
    return _module().head_layout(keys, values, head_dim)


def code_place(side: str, storage_format: str, head_dim: int, slot: int, dim: int) -> tuple[int, int]:
    """The byte in its region, and the lowest bit in that byte, of one code of the `keys` or `values`."""
    return _module().code_place(side, storage_format, head_dim, slot, dim)


def scalar_place(storage_format: str, slot: int, group: int, scalar: int) -> int:
    """The byte in its region of one scalar of a group of dims."""
    return _module().scalar_place(storage_format, slot, group, scalar)


# --- kernels over pages: csrc/pages.h ---------------------------------------------------------------------------------


def page_layer(
    keys: str,
    values: str,
    head_dim: int,
    num_kv_heads: int,
    offset: int,
    *,
    key_offset: torch.Tensor | None = None,
    key_scale: torch.Tensor | None = None,
    key_feedback: torch.Tensor | None = None,
    turns: int = 0,
) -> PageLayer:
    """One layer in the pages of its group. It is made once with the cache, and copies what it is given.

    Args:
        keys, values: storage formats.
        head_dim, num_kv_heads: `D` and `K`.
        offset: byte of a page at which the layer begins.
        key_offset, key_scale: `[K, D]` float32, of `KeyStatics`; None where keys are coded as they are.
        key_feedback: `[K, groups, g, g]` float32, of `KeyStatics`; for int4 keys alone.
        turns: which of a step's tables turns the layer's offset.
    """
    return _library().PageLayer(
        keys, values, head_dim, num_kv_heads, offset, key_offset, key_scale, key_feedback, turns
    )


def page_step(
    pool: torch.Tensor,
    page_bytes: int,
    *,
    num_tokens: Sequence[int],
    first_positions: Sequence[int],
    first_numbers: Sequence[int],
    page_tables: Sequence[torch.Tensor],
    turns: Sequence[torch.Tensor] = (),
    window: int | None = None,
) -> PageStep:
    """The pages of one layer group in one step. All that the layers' kernels rely on is checked here.

    Args:
        pool: `[P, stride]` uint8, whose rows are 64-byte aligned. It is kept alive.
        page_bytes: of all layers.
        num_tokens: of each span; their rows follow one another in `T`.
        first_positions: of each span's first token in its sequence.
        first_numbers: of the first page in each span's table.
        page_tables: for each span `[n]` int64, its pages in the pool. They are copied.
        turns: for each set of frequencies `[numbers, 2, D / 2]` float32, the table of `PageTurns`. They are kept.
        window: tokens that a query of the group sees, itself included; None sees all.
    """
    return _library().PageStep(
        capsule(pool),
        page_bytes,
        num_tokens,
        first_positions,
        first_numbers,
        [capsule(table) for table in page_tables],
        [capsule(table) for table in turns],
        window,
    )


def capsule(x: torch.Tensor) -> object:
    """A tensor as native calls take it at the least cost: asking it for its capsule takes longer than many a kernel.

    The capsule keeps the tensor's memory and sizes as they are now: `x` may be turned, or given other memory, while the
    library uses it. It cannot keep memory that is taken from the storage itself, by `x.untyped_storage().resize_`,
    by `x.share_memory_` or by an `x.resize_` to more than it holds: that must not happen while the library works.

    Raises:
        ValueError: the tensor is not on the CPU.
    """
    import torch

    if x.device.type != "cpu":
        raise ValueError(f"the native library works on the CPU: the tensor is on {x.device}")
    return torch.to_dlpack(x.detach())  # type: ignore[attr-defined]  # it is public


# --- products with weights: csrc/linear.h -----------------------------------------------------------------------------


def linear_weight(weight: QuantisedWeight | torch.Tensor) -> LinearWeight:
    """A matrix for native products. It is made once with the layer; the memory is kept, as `capsule` says.

    Args:
        weight: packed, or `[N, K]` bfloat16, whose products are made in fp32; `K` is a multiple of 32.

    Raises:
        ValueError: the memory is not contiguous, not on the CPU or, of a packed matrix, not aligned to 64 bytes, or it
            has another shape than the format, rows and columns ask for.
    """
    import torch

    if isinstance(weight, torch.Tensor):
        num_rows, num_columns = weight.shape
        return _library().LinearWeight("bf16", num_rows, num_columns, capsule(weight), False)
    return _library().LinearWeight(
        weight.format, weight.num_rows, weight.num_columns, capsule(weight.data), weight.fine_rows
    )


# --- decoder layers: csrc/layer.h -------------------------------------------------------------------------------------


def hidden_rows(x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> HiddenRows:
    """The hidden states of a step and how their tokens are turned. It is made once for all layers, which change `x`.

    Args:
        x: `[T, E]` float32, contiguous. It is kept, as `rope` is: `capsule` says how.
        rope: cosine and sine of each token's angles, `[T, 1, D]` float32, contiguous, as `rope_tables` gives them.

    Raises:
        ValueError: a tensor has the wrong dtype, shape or strides, or `x` overlaps the others.
    """
    return _library().HiddenRows(capsule(x), *map(capsule, rope))


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """What a decoder layer multiplies by.

    Attributes:
        q, k, v, o, gate, up, down: matrices and their biases, `[N]` float32.
        attention_input_norm, mlp_input_norm: `[E]` float32, what normalised rows are multiplied by, less
            `norm_offset`.
        attention_output_norm, mlp_output_norm: the same, of what is added to the hidden states, or None.
        q_norm, k_norm: `[D]`, of the heads of queries and keys, or None.
    """

    q: tuple[LinearWeight, torch.Tensor | None]
    k: tuple[LinearWeight, torch.Tensor | None]
    v: tuple[LinearWeight, torch.Tensor | None]
    o: tuple[LinearWeight, torch.Tensor | None]
    gate: tuple[LinearWeight, torch.Tensor | None]
    up: tuple[LinearWeight, torch.Tensor | None]
    down: tuple[LinearWeight, torch.Tensor | None]
    attention_input_norm: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    attention_output_norm: torch.Tensor | None
    mlp_input_norm: torch.Tensor
    mlp_output_norm: torch.Tensor | None
    norm_offset: float = 0.0


def decoder_layer(
    weights: LayerWeights, *, eps: float, head_dim: int, scale: float, window: int | None, activation: str
) -> DecoderLayer:
    """A decoder layer that `run_layers` runs. It is made once.

    Args:
        weights: as above; all fit together. They are kept, not copied: what is written to them later is computed with.
        eps: of every norm.
        head_dim: `D`, even.
        scale: multiplies the scores of attention.
        window: tokens that a query sees, itself included; None sees as many as the step's pages have.
        activation: of the gate, `silu` or `gelu_tanh`.

    Raises:
        ValueError: something has the wrong dtype, shape or strides, or is out of bounds.
    """
    w = weights
    matrices, biases = zip(w.q, w.k, w.v, w.o, w.gate, w.up, w.down, strict=True)
    norms = (
        w.attention_input_norm, w.q_norm, w.k_norm, w.attention_output_norm, w.mlp_input_norm, w.mlp_output_norm,
    )  # fmt: skip
    return _library().DecoderLayer(
        matrices,
        [None if bias is None else capsule(bias) for bias in biases],
        [None if norm is None else capsule(norm) for norm in norms],
        norm_offset=w.norm_offset,
        eps=eps,
        head_dim=head_dim,
        scale=scale,
        window=window,
        activation=activation,
    )


def run_layers(calls: Sequence[LayerCall], *, num_threads: int, stage_ns: torch.Tensor | None = None) -> None:
    """Run layers one after another: each writes the step's keys and values to its pages and changes the hidden states.

    A token's hidden state has the same bits whatever the other tokens of the step and the threads.

    Args:
        calls: in the order of the layers.
        num_threads: how many threads may work.
        stage_ns: int64, one for each of `layer_stages()`: the nanoseconds that they take are added.

    Raises:
        ValueError: the sizes of a call do not fit together, a layer's window is larger than that of its step, or what
            is written overlaps what its own call reads. No layer has run then.
        TypeError: a call has other members. No layer has run then.
        MemoryError: the system refuses memory to work in. Layers may have run: hidden states and pages are lost.
    """
    _library().run_layers(calls, num_threads=num_threads, stage_ns=stage_ns)


def can_run_layers(*, head_dim: int, activation: str) -> bool:
    """Whether there are native layers of such heads and such an activation."""
    return head_dim % 2 == 0 and head_dim <= page_layout()["most_head_dim"] and activation in ("silu", "gelu_tanh")


def layer_stages() -> tuple[str, ...]:
    """The parts of a native decoder layer whose time can be asked for, by what they do."""
    return tuple(_library().LAYER_STAGES)
