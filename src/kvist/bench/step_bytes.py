"""What a step of decode must read: the bytes that the bandwidth bounds it by."""

from __future__ import annotations

from dataclasses import dataclass

from kvist.cache.page_layout import PAGE_SLOTS
from kvist.cache.plan import CachePlan
from kvist.loading import LoadedModel


@dataclass(frozen=True)
class StepBytes:
    """Weights are read once a step, the cache once for each sequence.

    Attributes:
        weights: of all weights that every step reads.
        cache: of keys and values of all sequences.
    """

    weights: int
    cache: int

    @property
    def total(self) -> int:
        return self.weights + self.cache


def weights_read(loaded: LoadedModel) -> int:
    """Bytes of weights that a step reads: all but a table of token vectors that is not the output matrix as well."""
    if loaded.decoder.lm_head is None:
        return loaded.weights_bytes
    table = loaded.decoder.embed_tokens
    return loaded.weights_bytes - sum(tensor.nbytes for tensor in (*table.parameters(), *table.buffers()))


def cache_read(plan: CachePlan, context: int, num_steps: int) -> int:
    """Bytes of keys and values that a step of one sequence reads, on average over `num_steps` after `context` tokens.

    A token sees itself and all before it, or as many as the layer's window.
    """
    total = 0
    for group in plan.groups:
        window, bytes_per_token = group.layer_group.window, group.layout.page_bytes // PAGE_SLOTS
        for seen in range(context + 1, context + num_steps + 1):
            total += bytes_per_token * (seen if window is None else min(seen, window))
    return total // num_steps
