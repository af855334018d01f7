"""The figures of a plan: what each format costs, and what fits in a budget."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvist.cache.page_layout import PAGE_SLOTS
from kvist.cache.plan import CachePlan
from kvist.config import CacheConfig
from kvist.errors import OptionError
from kvist.kv_format import LayerFormats
from kvist.models.cache_shape import CacheShape

if TYPE_CHECKING:
    from kvist.memory import MemoryBudget

DEFAULT_FORMATS = tuple(LayerFormats.parse(name) for name in ("fp32", "bf16", "int8", "k=int8,v=int4", "int4"))
REWIND_SLACK_TOKENS = CacheConfig.rewind_slack_tokens


@dataclass(frozen=True)
class Request:
    """What is asked.

    Attributes:
        context: tokens of each sequence.
        batch: how many sequences.
        max_step_tokens: the most tokens of a sequence in one step.
        memory_bytes: what the cache may take.
        budget: the same, as it was said.
    """

    context: int
    batch: int
    max_step_tokens: int
    memory_bytes: int
    budget: MemoryBudget


@dataclass(frozen=True)
class FormatFigures:
    """What a format costs, and what fits.

    Attributes:
        kv_format: its name.
        cache: the formula.
        kv_bytes: the most bytes that all sequences together take at once.
        tokens_that_fit: the most tokens that each of the sequences can have in the budget; None: without end.
        sequences_that_fit: how many sequences of the context's length fit in the budget.
        variants: `kv_bytes` where the query heads shared another number of KV heads, in the order of
            `CacheShape.head_variants`.
    """

    kv_format: str
    cache: CachePlan
    kv_bytes: int
    tokens_that_fit: int | None
    sequences_that_fit: int
    variants: tuple[int, ...]


def figures(
    shape: CacheShape, formats: Sequence[LayerFormats], request: Request
) -> tuple[tuple[FormatFigures, ...], tuple[str, ...]]:
    """The figures of each format, and what is to be said of the formats that were left out.

    Args:
        shape: what the cache must hold.
        formats: those to plan; where there are none, `DEFAULT_FORMATS` as far as the head dim allows.
        request: what is asked.

    Raises:
        OptionError: a format cannot take the head dim or names a layer that is not there, or in none of them a sequence
            could begin.
    """
    found: list[FormatFigures] = []
    refusals: list[OptionError] = []
    for kv_format in {str(kv_format): kv_format for kv_format in formats or DEFAULT_FORMATS}.values():
        try:
            found.append(_of_format(shape, kv_format, request))
        except OptionError as error:
            if formats:
                raise
            refusals.append(error)
    if not found:
        raise refusals[0]
    least = min(found, key=lambda one: one.cache.least_bytes)
    if least.cache.least_bytes > request.memory_bytes:
        groups = len(least.cache.groups)
        raise OptionError(
            f"kv_memory is {request.memory_bytes:,} bytes: it must be at least {least.cache.least_bytes:,}, a page of "
            f"{PAGE_SLOTS} tokens in {least.kv_format}" + (f" for each of {groups} layer groups" if groups > 1 else "")
        )
    return tuple(found), tuple(map(str, refusals))


def _of_format(shape: CacheShape, kv_format: LayerFormats, request: Request) -> FormatFigures:
    def cache_of(of: CacheShape) -> CachePlan:
        return CachePlan(of.layers, kv_format, REWIND_SLACK_TOKENS, request.max_step_tokens)

    cache = cache_of(shape)
    tokens = cache.max_tokens(request.memory_bytes, request.batch)
    return FormatFigures(
        kv_format=str(kv_format),
        cache=cache,
        kv_bytes=request.batch * cache.bytes_for(request.context),
        tokens_that_fit=None if tokens == sys.maxsize else tokens,
        sequences_that_fit=cache.max_sequences(request.memory_bytes, request.context),
        variants=tuple(
            request.batch * cache_of(shape.with_kv_heads(num_kv_heads)).bytes_for(request.context)
            for num_kv_heads in shape.head_variants()
        ),
    )
