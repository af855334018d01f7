"""Attention of a step over the cache."""

from __future__ import annotations

from functools import partial

import torch

from kvist.cache.cache_view import CacheView
from kvist.kernels import native, split_attention


def kernel_name(device: torch.device) -> str:
    """Which kernel `attend` runs over pages on a device."""
    return f"native {native.isa()}" if device.type == "cpu" else "torch-split"


def attend(
    q: torch.Tensor,
    cache: CacheView,
    layer: int,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of every token of the step over its own sequence in the cache.

    A token has the same bits, however its context was computed, and pages are read through their storage format. How
    many KV heads the query heads share, and how far back a query sees, is the cache's to say.

    Args:
        q: `[T, H, D]`, packed as the view's spans are; `H` is a multiple of the layer's KV heads.
        cache: holds this step's keys and values already.
        layer: whose keys and values are read.
        scale, softcap, sinks: as in `kernels.split_attention.attention`.

    Returns:
        `[T, H, D]` in the dtype of `q`.

    Raises:
        SequenceError: a view made before is of no use any more, as in `CacheView.write`.
        ValueError: there is no such layer, an argument is not of its shape, or `softcap` is out of range.
    """
    _check(q, cache, layer, softcap, sinks)
    if cache.is_native(layer):
        return cache.attend(layer, q, scale=scale, softcap=softcap, sinks=sinks)
    return attend_splits(q, cache, layer, scale=scale, softcap=softcap, sinks=sinks)


def attend_splits(
    q: torch.Tensor,
    cache: CacheView,
    layer: int,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `attend`, in plain PyTorch on any device; the arguments are sound."""
    num_kv_heads, window = cache.layout(layer).num_kv_heads, cache.window(layer)
    mixed = torch.empty_like(q)
    for index, (span, row, first) in enumerate(zip(cache.spans, cache.row_starts, cache.first_positions, strict=True)):
        if not span.num_tokens:
            continue
        rows = slice(row, row + span.num_tokens)
        mixed[rows] = split_attention.attention(
            q[rows],
            partial(cache.read_split, layer, index),
            first,
            num_kv_heads=num_kv_heads,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )
    return mixed


def _check(q: torch.Tensor, cache: CacheView, layer: int, softcap: float | None, sinks: torch.Tensor | None) -> None:
    """Refuse here what one way would refuse and another compute."""
    layout = cache.layout(layer)
    num_kv_heads, head_dim = layout.num_kv_heads, layout.head_dim
    num_heads = q.shape[1] if q.dim() == 3 else 0
    if not num_heads or num_heads % num_kv_heads or q.shape != (cache.num_tokens, num_heads, head_dim):
        raise ValueError(
            f"layer {layer} takes queries ({cache.num_tokens}, a multiple of {num_kv_heads}, {head_dim}), not "
            f"{tuple(q.shape)}"
        )
    if sinks is not None and sinks.shape != (num_heads,):
        raise ValueError(f"sinks are {tuple(sinks.shape)}: there must be one for each of {num_heads} query heads")
    if softcap is not None and not 1e-30 <= softcap <= 1e30:  # so that its inverse is a number, too
        raise ValueError(f"softcap is {softcap}: it must be from 1e-30 to 1e30")
