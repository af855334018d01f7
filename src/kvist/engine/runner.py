"""From a step's plan to the tensors that the model takes."""

from __future__ import annotations

import torch

from kvist.cache.kv_cache import KVCache, Span
from kvist.engine.step_plan import StepPlan
from kvist.models.step_inputs import StepInputs


def step_inputs(plan: StepPlan, cache: KVCache) -> StepInputs:
    """Pack the plan's chunks one after another. Their room in the cache must be reserved."""
    token_ids: list[int] = []
    logit_rows: list[int] = []
    for chunk in plan.chunks:
        token_ids += chunk.sequence.token_ids[chunk.start : chunk.stop]
        if chunk.samples:
            logit_rows.append(len(token_ids) - 1)
    view = cache.view([Span(chunk.sequence.room.sequence_id, chunk.num_tokens) for chunk in plan.chunks])
    return StepInputs(
        token_ids=torch.tensor(token_ids, device=cache.device),
        positions=view.positions(),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64, device=cache.device),
        cache=view,
    )
