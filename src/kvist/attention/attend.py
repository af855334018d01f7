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
    num_kv_heads: int,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Attention of every token of the step over its own sequence in the cache.

    A token has the same bits, however its context was computed, and pages are read through their storage format.

    Args:
        q: `[T, H, D]`, packed as the view's spans are.
        cache: holds this step's keys and values already.
        layer: whose keys and values are read.
        num_kv_heads, scale, window: as in `kernels.split_attention.attention`.

    Returns:
        `[T, H, D]` in the dtype of `q`.
    """
    if cache.is_native(layer):
        return cache.attend(layer, q, scale=scale, window=window)
    return attend_splits(q, cache, layer, num_kv_heads=num_kv_heads, scale=scale, window=window)


def attend_splits(
    q: torch.Tensor, cache: CacheView, layer: int, *, num_kv_heads: int, scale: float, window: int | None = None
) -> torch.Tensor:
    """As `attend`, in plain PyTorch on any device."""
    mixed = torch.empty_like(q)
    for index, (span, row, first) in enumerate(zip(cache.spans, cache.row_starts, cache.first_positions, strict=True)):
        rows = slice(row, row + span.num_tokens)
        read = partial(cache.read_split, layer, index)
        mixed[rows] = split_attention.attention(
            q[rows], read, first, num_kv_heads=num_kv_heads, scale=scale, window=window
        )
    return mixed
