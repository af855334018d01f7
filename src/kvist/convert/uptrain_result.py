"""What a training came to."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvist.bench.machine import MachineFacts
from kvist.convert.uptrain_curve import Curve


@dataclass(frozen=True)
class UptrainResult:
    """What a training came to.

    Attributes:
        steps, tokens, seconds: that it took.
        loss_before, loss_after: of the held-out text, nats per token.
        references: the same of the teacher, and of a bigram model fitted on the training text, by name.
        curve: of the training.
    """

    steps: int
    tokens: int
    seconds: float
    loss_before: float
    loss_after: float
    references: dict[str, float]
    curve: Curve

    def facts(self) -> dict[str, object]:
        """The same for `conversion.json`; the curve lies beside it."""
        return {
            "steps": self.steps,
            "tokens": self.tokens,
            "seconds": round(self.seconds, 1),
            "loss_before": self.loss_before,
            "loss_after": self.loss_after,
            "references": self.references,
            "machine": MachineFacts.gather(torch.get_num_threads()).line,
        }
