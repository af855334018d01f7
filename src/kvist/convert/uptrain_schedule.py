"""The learning rate over the steps: a linear warm-up, then half a cosine (arXiv 1608.03983)."""

from __future__ import annotations

import math

_WARM_UP_FRACTION = 0.05
# The last steps still learn a little: a rate of zero would waste them.
_LAST_FRACTION = 0.05


def learning_rate(step: int, num_steps: int, highest: float) -> float:
    """The rate of a step, counted from 0. It depends on nothing else, so a training that goes on finds its place."""
    warm_up = max(1, round(_WARM_UP_FRACTION * num_steps))
    if step < warm_up:
        return highest * (step + 1) / warm_up
    through = (step - warm_up) / max(1, num_steps - 1 - warm_up)
    falling = 0.5 * (1 + math.cos(math.pi * min(1.0, through)))
    return highest * (_LAST_FRACTION + (1 - _LAST_FRACTION) * falling)
