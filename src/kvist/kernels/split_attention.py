"""Attention over splits at absolute positions, in plain PyTorch: the twin of the native kernels over pages.

A query meets its keys split by split. The splits, and the tiles in which queries are computed, begin at absolute
positions:

    positions    0        256      512      768
    keys         | split 0| split 1| split 2|        each gives a largest score, a sum of weights and mixed values;
    queries                          [tile]          they are merged from left to right (online softmax)

So the bits of a query's result depend on nothing but itself and the keys and values that it sees: not on the queries
beside it, nor on the step that computed it, nor on how many threads there are. Three things make it so:

- Every product has the same shape, since the sums inside one of another shape may round differently. A tile's missing
  queries are zeros.
- What a query does not see changes nothing, exactly: its weight is zero, and a split of which it sees nothing leaves
  what was merged before as it is. A split may be left out, or computed for the sake of other queries.
- What is added up between products is added in a fixed order, by operations that round each number by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

SPLIT = 256
"""Positions of a split; a multiple of a page."""

QUERY_TILE = 4
"""Queries of a tile. More are faster for prompts, but a single token costs as much as a whole tile."""

# What is computed at once: so many splits for a few tiles, or so many tiles of one split.
_MOST_SPLITS = 8
_MOST_TILES = 64

# The largest score of a split that nothing is seen of. It is finite, so that differences stay numbers.
_LEAST_SCORE = torch.finfo(torch.float32).min

ReadSplits = Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of positions `start` to `stop` (exclusive), `[K, stop - start, D]` float32 each, both multiples of
`SPLIT`. They are zeros beyond the sequence's end."""


def attention(
    q: torch.Tensor,
    read: ReadSplits,
    first_position: int,
    *,
    num_kv_heads: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of consecutive tokens of one sequence over all its tokens, computed in float32.

    Query head `h` reads KV head `h // group_size`; the queries of a group share its keys without repeating them.

    Args:
        q: `[T, H, D]`, queries of the positions from `first_position` on.
        read: gives keys and values, those of these tokens included. A key or value that is infinite or no number makes
            the queries that see it NaN.
        first_position: of the first query.
        num_kv_heads: `K`, a divisor of `H`.
        scale: multiplies the scores.
        window: tokens that a query sees, itself included; None sees all.
        softcap: scores `s` become `softcap * tanh(s / softcap)`, as in Gemma 2 (arXiv 2408.00118).
        sinks: `[H]`, the logit of a place that every query of a head may attend to and that holds nothing
            (arXiv 2309.17453, "SinkAttention").

    Returns:
        `[T, H, D]` in the dtype of `q`.
    """
    num_queries, num_heads, head_dim = q.shape
    group_size, stop = num_heads // num_kv_heads, first_position + num_queries
    first_tile, stop_tile = first_position // QUERY_TILE, -(-stop // QUERY_TILE)
    num_tiles, skipped = stop_tile - first_tile, first_position % QUERY_TILE

    scaled = q.new_zeros((num_tiles * QUERY_TILE, num_heads, head_dim), dtype=torch.float32)
    scaled[skipped : skipped + num_queries] = q.float() * scale
    queries = scaled.view(num_tiles, QUERY_TILE, num_kv_heads, group_size, head_dim).permute(2, 0, 3, 1, 4)
    queries = queries.reshape(num_kv_heads, num_tiles, group_size * QUERY_TILE, head_dim)
    merged = _Merged(queries, sinks)

    first_seen = 0 if window is None else max(0, first_position - window + 1)
    step = max(1, _MOST_SPLITS // num_tiles) * SPLIT
    keys_stop = -(-stop // SPLIT) * SPLIT
    for start in range(first_seen // SPLIT * SPLIT, keys_stop, step):
        positions = range(start, min(start + step, keys_stop))
        k, v = (
            tensor.reshape(num_kv_heads, -1, SPLIT, head_dim).contiguous()
            for tensor in read(positions.start, positions.stop)
        )
        first, last = _tiles_that_see(positions, window)
        for tile in range(max(first_tile, first), min(stop_tile, last), _MOST_TILES):
            tiles = range(tile, min(tile + _MOST_TILES, stop_tile, last))
            rows = slice(tiles.start - first_tile, tiles.stop - first_tile)
            scores = _products(queries[:, None, rows], k.transpose(-1, -2))
            if softcap is not None:
                scores = scores.div_(softcap).tanh_().mul_(softcap)
            hidden = _hidden(tiles, positions, window, q.device)
            if hidden is not None:
                shape = (*scores.shape[:3], group_size, QUERY_TILE, SPLIT)
                scores.view(shape).masked_fill_(hidden, float("-inf"))
            merged.merge(rows, scores, v)

    mixed = merged.result().view(num_kv_heads, num_tiles, group_size, QUERY_TILE, head_dim).permute(1, 3, 0, 2, 4)
    return mixed.reshape(scaled.shape)[skipped : skipped + num_queries].to(q.dtype)


class _Merged:
    """What the queries have gathered from the splits so far.

    Args:
        queries: `[K, tiles, rows, D]`, for their shape; the rows of a tile are those of the group's first head, then
            those of its second, and so on.
        sinks: as in `attention`.
    """

    def __init__(self, queries: torch.Tensor, sinks: torch.Tensor | None) -> None:
        shape = (*queries.shape[:-1], 1)
        self._mixed = torch.zeros_like(queries)
        if sinks is None:
            self._top, self._total = queries.new_full(shape, _LEAST_SCORE), queries.new_zeros(shape)
        else:
            each_row = sinks.to(queries).repeat_interleave(QUERY_TILE).view(shape[0], 1, -1, 1)
            self._top, self._total = each_row.expand(shape).clone(), queries.new_ones(shape)

    def merge(self, tiles: slice, scores: torch.Tensor, v: torch.Tensor) -> None:
        """Merge the next splits into some tiles, in order. The scores are overwritten.

        Args:
            tiles: which.
            scores: `[K, splits, tiles, rows, SPLIT]`.
            v: `[K, splits, SPLIT, D]`.
        """
        tops = scores.amax(-1, keepdim=True).clamp_(min=_LEAST_SCORE)
        weights = scores.sub_(tops).exp_()
        totals, mixes = weights.sum(-1, keepdim=True), _mixes(weights, v)
        top, total, mixed = self._top[:, tiles], self._total[:, tiles], self._mixed[:, tiles]
        for split in range(scores.shape[1]):
            highest = torch.maximum(top, tops[:, split])
            kept, added = (top - highest).exp_(), (tops[:, split] - highest).exp_()
            # Multiplied and added apart: what fuses the two may do so for some elements only.
            total.mul_(kept).add_(totals[:, split].mul_(added))
            mixed.mul_(kept).add_(mixes[:, split].mul_(added))
            top.copy_(highest)

    def result(self) -> torch.Tensor:
        """The weighted means, `[K, tiles, rows, D]`."""
        return self._mixed / self._total


def _tiles_that_see(positions: range, window: int | None) -> tuple[int, int]:
    """The first tile of which a query sees one of the positions, and the one after the last."""
    first = positions.start // QUERY_TILE
    return first, sys.maxsize if window is None else (positions.stop - 2 + window) // QUERY_TILE + 1


def _hidden(tiles: range, positions: range, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Where queries of tiles do not see positions, `[splits, tiles, 1, QUERY_TILE, SPLIT]`; None if they see all."""
    first, last = tiles.start * QUERY_TILE, tiles.stop * QUERY_TILE - 1
    if positions.stop - 1 <= first and (window is None or positions.start > last - window):
        return None
    query = torch.arange(first, last + 1, device=device).view(1, -1, 1, QUERY_TILE, 1)
    key = torch.arange(positions.start, positions.stop, device=device).view(-1, 1, 1, 1, SPLIT)
    hidden = key > query
    return hidden if window is None else hidden | (key <= query - window)


def _mixes(weights: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Weighted sums of values. One that is infinite or no number makes those NaN that see it, and no others.

    Zero times such a value is no number either, and in a step of several tokens some see a value that others do not.
    """
    broken = v.isfinite().all(-1).logical_not_()
    if not broken.any():
        return _products(weights, v)
    mixes = _products(weights, v.masked_fill(broken.unsqueeze(-1), 0))
    seen = ((weights > 0) & broken[:, :, None, None]).any(-1, keepdim=True)
    return mixes.masked_fill_(seen, torch.nan)


def _products(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The matrix products of every tile with every split of its KV head.

    Args:
        left: `[K, splits, tiles, rows, n]`, or 1 in place of the splits where they share it.
        right: `[K, splits, n, m]`.

    Returns:
        `[K, splits, tiles, rows, m]`.
    """
    num_kv_heads, num_splits = right.shape[:2]
    num_tiles, rows = left.shape[2:4]
    left, right = left.expand(-1, num_splits, -1, -1, -1).flatten(0, 1), right.flatten(0, 1)
    out = left.new_empty(num_kv_heads * num_splits, num_tiles, rows, right.shape[-1])
    if num_tiles < len(right):
        for tile in range(num_tiles):
            _multiply(left[:, tile], right, out[:, tile])
    else:
        for each, (matrices, shared) in enumerate(zip(left, right, strict=True)):
            _multiply(matrices, shared.expand(num_tiles, -1, -1), out[each])
    return out.view(num_kv_heads, num_splits, *out.shape[1:])


def _multiply(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    """Products of pairs of matrices, each rounded as it would be alone.

    MKL gives each pair to one thread, but where there are fewer pairs than threads it may let several share one, and
    then rounds it in another way. So there are never fewer: they are repeated, without copying.
    """
    num_pairs, num_threads = len(left), torch.get_num_threads()
    if num_pairs >= num_threads:
        torch.bmm(left, right, out=out)
        return
    for pair in range(num_pairs):
        copies = (matrix[pair].expand(num_threads, -1, -1) for matrix in (left, right))
        out[pair] = torch.bmm(*copies)[0]
