"""Attention of a step over the cache."""

from __future__ import annotations

import torch

from kvist.cache.kv_cache import CacheView
from kvist.kernels import sdpa


def kernel_name() -> str:
    """Which kernel `attend` runs."""
    return "torch-sdpa"


def attend(
    q: torch.Tensor,
    cache: CacheView,
    layer: int,
    *,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Attention of every token of the step over its own sequence in the cache.

    Args:
        q: `[T, H, D]`, packed as the view's spans are.
        cache: holds this step's keys and values already.
        layer: whose keys and values are read.
        scale, window: as in `kernels.reference.attention`.

    Returns:
        `[T, H, D]` in the dtype of `q`.
    """
    mixed = torch.empty_like(q)
    for index, (span, row, first) in enumerate(zip(cache.spans, cache.row_starts, cache.first_positions, strict=True)):
        # Keys before the first query's window are seen by no query of the span.
        start = 0 if window is None else max(0, first - window + 1)
        keys, values = cache.read(layer, index, start)
        rows = slice(row, row + span.num_tokens)
        mixed[rows] = sdpa.attention(q[rows], keys, values, scale=scale, window=window)
    return mixed
