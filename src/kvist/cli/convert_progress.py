"""How far a training is: a bar on a terminal, a line now and then elsewhere. All on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvist.cli.output import print_note

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

    from kvist.convert.uptrain import Uptraining
    from kvist.convert.uptrain_curve import CurveRow

# Without a terminal to look at, whoever waits is told this often, and whenever the held-out text was judged.
_LINE_S = 60.0


class TrainingProgress:
    """Loss, tokens per second and the time that is left.

    Args:
        training: that is shown.
    """

    def __init__(self, training: Uptraining) -> None:
        self._training = training
        self._began_s = self._told_s = time.monotonic()
        self._first = training.step
        self._bars: RichProgress | None = None
        self._task: TaskID | None = None

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Within, a terminal shows a bar."""
        if not sys.stderr.isatty():
            yield
            return
        self._bars = _bars()
        self._task = self._bars.add_task("", total=self._training.num_steps, completed=self._training.step, facts="")
        with self._bars:
            yield

    def told(self, row: CurveRow) -> None:
        """A step is done."""
        if self._bars is not None and self._task is not None:
            self._bars.update(self._task, completed=row.step, facts=self._facts(row))
        elif row.validation_loss is not None or time.monotonic() - self._told_s > _LINE_S:
            self._told_s = time.monotonic()
            print_note(f"step {row.step:,} of {self._training.num_steps:,}, {self._facts(row)}")

    def _facts(self, row: CurveRow) -> str:
        done = row.step - self._first
        left_s = (time.monotonic() - self._began_s) / max(1, done) * (self._training.num_steps - row.step)
        judged = self._training.curve.validations
        held_out = f", held out {judged[-1][1]:.3f}" if judged else ""
        return f"loss {row.loss:.3f}{held_out}, {row.tokens_per_s:,.0f} tokens/s, {_in_minutes(left_s)} left"


def _in_minutes(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}"


def _bars() -> RichProgress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    return Progress(
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[facts]}", markup=False),
        console=Console(stderr=True),
        expand=True,
    )
