"""The figures of a plan: what each format costs, and what fits in a budget."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvist.cache.plan import CachePlan
from kvist.config import CacheConfig, EngineConfig
from kvist.errors import OptionError
from kvist.kv_format import LayerFormats
from kvist.models.cache_shape import CacheShape

if TYPE_CHECKING:
    from kvist.memory import MemoryBudget

REWIND_SLACK_TOKENS = CacheConfig.rewind_slack_tokens


@dataclass(frozen=True)
class Request:
    """What is asked.

    Attributes:
        context: tokens of each sequence.
        batch: how many sequences.
        max_step_tokens: the most tokens of a sequence in one step.
        memory_bytes: what the cache may take; 0 where the weights leave nothing.
        budget: the same, as it was said.
    """

    context: int
    batch: int
    max_step_tokens: int
    memory_bytes: int
    budget: MemoryBudget

    @property
    def max_sequences(self) -> int:
        """How many sequences the engine runs at once, whatever memory there is."""
        return min(EngineConfig.max_sequences, self.max_step_tokens)


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
    shape: CacheShape, formats: Sequence[LayerFormats], request: Request, *, leave_out: bool
) -> tuple[tuple[FormatFigures, ...], tuple[str, ...]]:
    """The figures of each format, and what is to be said of the formats that were left out.

    Args:
        shape: what the cache must hold.
        formats: those to plan, each once.
        request: what is asked.
        leave_out: the formats that the model does not allow, rather than raise.

    Raises:
        OptionError: a format cannot take the head dim or names a layer that is not there, or in none of them a sequence
            could begin.
    """
    found: list[FormatFigures] = []
    refusals: list[OptionError] = []
    for kv_format in formats:
        try:
            found.append(_of_format(shape, kv_format, request))
        except OptionError as error:
            if not leave_out:
                raise
            refusals.append(error)
    if not found:
        raise refusals[0]
    if request.memory_bytes:
        min((one.cache for one in found), key=lambda cache: cache.least_bytes).check_budget(request.memory_bytes)
    return tuple(found), tuple(dict.fromkeys(map(str, refusals)))


def tokens_or_none(tokens: int) -> int | None:
    """A number of tokens that fit; None for one without end."""
    return None if tokens == sys.maxsize else tokens


def _of_format(shape: CacheShape, kv_format: LayerFormats, request: Request) -> FormatFigures:
    def plan_of(variant: CacheShape) -> CachePlan:
        return CachePlan(variant.layers, kv_format, REWIND_SLACK_TOKENS, request.max_step_tokens)

    cache = plan_of(shape)
    return FormatFigures(
        kv_format=str(kv_format),
        cache=cache,
        kv_bytes=request.batch * cache.bytes_for(request.context),
        tokens_that_fit=tokens_or_none(cache.max_tokens(request.memory_bytes, request.batch)),
        sequences_that_fit=cache.max_sequences(request.memory_bytes, request.context),
        variants=tuple(
            request.batch * plan_of(shape.with_kv_heads(num_kv_heads)).bytes_for(request.context)
            for num_kv_heads in shape.head_variants()
        ),
    )
