"""Attention of a step over a paged cache, through its storage format."""

from __future__ import annotations

from functools import partial

import torch

from kvist.cache.paged_view import PagedView
from kvist.kernels import split_attention


def attend_pages(
    q: torch.Tensor,
    cache: PagedView,
    layer: int,
    *,
    num_kv_heads: int,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Attention of every token of the step over its own sequence in the cache.

    Args:
        q: `[T, H, D]`, packed as the view's spans are.
        cache: holds this step's keys and values already.
        layer: whose keys and values are read.
        num_kv_heads, scale, window: as in `kernels.split_attention.attention`.

    Returns:
        `[T, H, D]` in the dtype of `q`.
    """
    mixed = torch.empty_like(q)
    for index, (span, row, first) in enumerate(zip(cache.spans, cache.row_starts, cache.first_positions, strict=True)):
        rows = slice(row, row + span.num_tokens)
        mixed[rows] = split_attention.attention(
            q[rows],
            partial(cache.read_split, layer, index),
            first,
            num_kv_heads=num_kv_heads,
            scale=scale,
            window=window,
        )
    return mixed
