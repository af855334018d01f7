"""Attention of a step over the cache."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from kvist.cache.cache_view import CacheView
from kvist.kernels import sdpa, split_attention
from kvist.kv_format import KVFormat

# Where several tokens of a sequence are computed at once, these go through PyTorch's own attention: it rounds as
# Hugging Face models do, but in another way for another number of tokens.
_PLAIN = (KVFormat("bf16", "bf16"), KVFormat("fp32", "fp32"))


def kernel_name(kv_format: KVFormat, device: torch.device) -> str:
    """Which kernel `attend` runs over pages of a format on a device."""
    own = "native" if device.type == "cpu" else "torch-split"
    if kv_format not in _PLAIN:
        return own
    return f"{own}, torch-sdpa in prefill" if own == "native" else "torch-sdpa"


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

    Args:
        q: `[T, H, D]`, packed as the view's spans are.
        cache: holds this step's keys and values already. Pages are read through their storage format.
        layer: whose keys and values are read.
        num_kv_heads, scale, window: as in `kernels.split_attention.attention`.

    Returns:
        `[T, H, D]` in the dtype of `q`.
    """
    is_plain, decodes = cache.format(layer) in _PLAIN, all(span.num_tokens == 1 for span in cache.spans)
    if cache.is_native(layer) and (decodes or not is_plain):
        return cache.attend(layer, q, scale=scale, window=window)
    if is_plain:
        return _attend_plain(q, cache, layer, scale=scale, window=window)
    return attend_splits(q, cache, layer, num_kv_heads=num_kv_heads, scale=scale, window=window)


def attend_splits(
    q: torch.Tensor, cache: CacheView, layer: int, *, num_kv_heads: int, scale: float, window: int | None = None
) -> torch.Tensor:
    """As `attend`, by `kernels.split_attention`: a token has the same bits, however its context was computed."""
    mixed = torch.empty_like(q)
    for index, (rows, first) in enumerate(_spans(cache)):
        read = partial(cache.read_split, layer, index)
        mixed[rows] = split_attention.attention(
            q[rows], read, first, num_kv_heads=num_kv_heads, scale=scale, window=window
        )
    return mixed


def _attend_plain(q: torch.Tensor, cache: CacheView, layer: int, *, scale: float, window: int | None) -> torch.Tensor:
    mixed = torch.empty_like(q)
    for index, (rows, first) in enumerate(_spans(cache)):
        # Keys before the first query's window are seen by no query of the span.
        keys, values = cache.read(layer, index, 0 if window is None else max(0, first - window + 1))
        mixed[rows] = sdpa.attention(q[rows], keys, values, scale=scale, window=window)
    return mixed


def _spans(cache: CacheView) -> Iterator[tuple[slice, int]]:
    """The rows of each span, and the position of the first."""
    for span, row, first in zip(cache.spans, cache.row_starts, cache.first_positions, strict=True):
        yield slice(row, row + span.num_tokens), first
