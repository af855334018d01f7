"""What an uptraining does, and on how much."""

from __future__ import annotations

from dataclasses import dataclass

from kvist.checks import check_integer, check_number
from kvist.config import check_format
from kvist.errors import OptionError

TRAINED = ("all", "attention")
COMPUTE = ("auto", "fp32", "bf16")
DEFAULT_LEARNING_RATE = 3e-4

_MOST_SEED = 2**64 - 1  # that PyTorch takes
MOST_STEPS = 10_000_000
"""Of a schedule: far more than any machine takes."""


@dataclass(frozen=True, kw_only=True)
class UptrainConfig:
    """How a student is trained.

    Args:
        steps: how many; None where `minutes` says it.
        minutes: in place of `steps`, how long it may take: as many steps are planned as fit, by the time of the first.
            A training that goes on has its steps, and needs neither.
        sequence: tokens of a sequence; a BOS token counts.
        batch: sequences of a step.
        learning_rate: the highest of the schedule; None for 3e-4, or what a training that goes on had.
        weight_decay: of matrices; vectors have none.
        logit_weight: of the divergence from the teacher's predictions.
        attention_weight: of the difference from its layers' attention outputs.
        text_weight: of the loss on the text itself.
        every: positions from one whose predictions count to the next; the first moves on from step to step.
        train: `all` weights or those of `attention` alone.
        compute: `fp32`, `bf16` under autocast with master weights in fp32, or `auto`, the faster of both here.
        gradient_checkpointing: compute a layer's activations again in the backward pass, to keep fewer of them.
        save_minutes: between two training checkpoints.
        seed: of the order of sequences and of all that is drawn.

    Raises:
        OptionError: a value is out of range.
    """

    steps: int | None = None
    minutes: float | None = None
    sequence: int = 256
    batch: int = 8
    learning_rate: float | None = None
    weight_decay: float = 0.0
    logit_weight: float = 1.0
    attention_weight: float = 1.0
    text_weight: float = 0.0
    every: int = 1
    train: str = "all"
    compute: str = "auto"
    gradient_checkpointing: bool = False
    save_minutes: float = 5.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps is not None and self.minutes is not None:
            raise OptionError("give either steps or minutes: one of them says how long to train")
        if self.steps is not None:
            check_integer("steps", self.steps, 1, MOST_STEPS)
        if self.minutes is not None:
            check_number("minutes", self.minutes, 0, open_low=True)
        check_integer("sequence", self.sequence, 2)
        check_integer("batch", self.batch, 1)
        if self.learning_rate is not None:
            check_number("learning_rate", self.learning_rate, 0, open_low=True)
        check_number("save_minutes", self.save_minutes, 0)
        for name in ("weight_decay", "logit_weight", "attention_weight", "text_weight"):
            check_number(name, getattr(self, name), 0)
        if not (self.logit_weight or self.attention_weight or self.text_weight):
            raise OptionError("all losses have the weight 0, so that there is nothing to learn: give one a weight")
        check_integer("every", self.every, 1, self.sequence, note=", the tokens of a sequence")
        check_integer("seed", self.seed, 0, _MOST_SEED)
        check_format("train", self.train, TRAINED)
        check_format("compute", self.compute, COMPUTE)
