"""What fewer KV heads would cost and save: a half, a quarter and an eighth of those that a model has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvist.cache.plan import CachePlan
from kvist.cli.plan_figures import REWIND_SLACK_TOKENS, tokens_or_none

if TYPE_CHECKING:
    from kvist.cli.plan_figures import FormatFigures, Request
    from kvist.models.cache_shape import CacheShape

_SHARES = (2, 4, 8)


@dataclass(frozen=True)
class HeadsInFormat:
    """What so many KV heads cost in one format.

    Attributes:
        kv_bytes: the most bytes that all sequences together take at once.
        saved_bytes: how many fewer these are than with all heads.
        tokens_that_fit, sequences_that_fit: as in `FormatFigures`.
        read_share: what a step of decoding reads at the end of the context, weights and cache, as a share of what it
            reads with all heads; None where the weights are not known. Decoding is bound by it: its speed rises by
            the inverse at most.
    """

    kv_bytes: int
    saved_bytes: int
    tokens_that_fit: int | None
    sequences_that_fit: int
    read_share: float | None


@dataclass(frozen=True)
class FewerHeads:
    """A number of KV heads that those of the model can be merged into.

    Attributes:
        num_kv_heads: it.
        weights_bytes: of the model with so many; None where the weights are not known.
        formats: what it costs in each, in the order of the plan's rows.
    """

    num_kv_heads: int
    weights_bytes: int | None
    formats: tuple[HeadsInFormat, ...]


def merged_numbers(num_kv_heads: int) -> tuple[int, ...]:
    """A half, a quarter and an eighth of the KV heads, where they are whole numbers; else the numbers nearest to that.

    None where there is one head alone.
    """
    shares = tuple(num_kv_heads // share for share in _SHARES if num_kv_heads % share == 0)
    if shares:
        return shares
    divisors = [number for number in range(num_kv_heads // 3, 0, -1) if num_kv_heads % number == 0]
    return tuple(divisors[: len(_SHARES)])


def fewer_heads(
    shape: CacheShape,
    rows: Sequence[FormatFigures],
    request: Request,
    weights_bytes: int | None,
    weights_with: Callable[[int], int],
) -> tuple[FewerHeads, ...]:
    """What fewer KV heads would cost and save.

    Args:
        shape: what the cache must hold as the model is.
        rows: what that costs in each format.
        request: what is asked.
        weights_bytes: of the model as it is; None where they are not known.
        weights_with: of the model with another number of KV heads; asked only where they are known.
    """
    found = []
    for num_kv_heads in merged_numbers(shape.num_kv_heads):
        fewer = None if weights_bytes is None else weights_with(num_kv_heads)
        layers = shape.with_kv_heads(num_kv_heads).layers
        formats = []
        for row in rows:
            cache = CachePlan(layers, row.cache.kv_format, REWIND_SLACK_TOKENS, request.max_step_tokens)
            kv_bytes = request.batch * cache.bytes_for(request.context)
            formats.append(
                HeadsInFormat(
                    kv_bytes=kv_bytes,
                    saved_bytes=row.kv_bytes - kv_bytes,
                    tokens_that_fit=tokens_or_none(cache.max_tokens(request.memory_bytes, request.batch)),
                    sequences_that_fit=cache.max_sequences(request.memory_bytes, request.context),
                    read_share=None
                    if fewer is None or weights_bytes is None
                    else (fewer + kv_bytes) / (weights_bytes + row.kv_bytes),
                )
            )
        found.append(FewerHeads(num_kv_heads, fewer, tuple(formats)))
    return tuple(found)
