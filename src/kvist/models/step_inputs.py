"""What one step hands to a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvist.cache.cache_view import CacheView


@dataclass(frozen=True)
class StepInputs:
    """The tokens of a step, those of all its sequences packed one after another without padding.

    Attributes:
        token_ids: `[T]` int64.
        positions: `[T]` int64, each token's place in its own sequence.
        logit_rows: `[S]` int64, ascending, the rows of `T` whose logits are wanted (the last of each sequence that
            samples; all rows when a text is scored).
        cache: where the layers write this step's keys and values and read all that came before.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    logit_rows: torch.Tensor
    cache: CacheView
