"""Uptraining: a student with few KV heads learns to predict, and to attend, as its teacher with many does.

    for each step   sequences -> teacher: hidden states, attention outputs          no gradients
                    sequences -> student: the same, with gradients
                    losses -> gradients -> AdamW, at the schedule's rate
    now and then    a training checkpoint; the loss on a text that is not trained on
    at the end      the student's weights take the place of those in its folder

The idea, to convert and then train for a small part of the original steps, is that of the GQA paper (arXiv 2305.13245);
to train on a teacher's predictions that of knowledge distillation (arXiv 1503.02531).
"""

from __future__ import annotations

import math
import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import torch

from kvist.convert import uptrain_checkpoint as checkpoints
from kvist.convert.record import ConversionRecord, add_training
from kvist.convert.uptrain_checks import only_training
from kvist.convert.uptrain_config import MOST_STEPS, UptrainConfig
from kvist.convert.uptrain_curve import CURVE_FILE, Curve, CurveRow
from kvist.convert.uptrain_finish import check_storable, replace_weights
from kvist.convert.uptrain_losses import StepLosses, backward, text_loss
from kvist.convert.uptrain_plan import TrainingPlan
from kvist.convert.uptrain_prepare import prepare
from kvist.convert.uptrain_result import UptrainResult
from kvist.convert.uptrain_schedule import learning_rate
from kvist.engine.uninterrupted import uninterrupted
from kvist.errors import NumericsError, OptionError
from kvist.evaluate.text_windows import EvaluationText
from kvist.loading.progress import Progress, no_progress

_MOST_GRADIENT = 1.0  # the norm that longer gradients are brought down to
_VALIDATIONS = 8  # over the whole training, at most
_PROBED_STEPS = 3


class Uptraining:
    """A training on the CPU, ready to run.

    Args:
        directory: of the student, which is replaced in the end.
        teacher: a model by path, name or Hub id; None where the text's loss alone counts.
        texts: that are trained on.
        held_out: judged on alone; None keeps the last part of `texts` apart.
        config: how.
        resume: go on from the training checkpoint in `directory`.
        restart: begin anew although there is one; the first that is saved takes its place.
        progress: told how far preparing is.

    Attributes:
        num_steps: of the schedule.
        step: that are done.
        saved_step: that the training checkpoint in the folder has; None without one.
        learning_rate: the highest of the schedule.
        learning_rate_before: the same before it stopped; None for a training that begins.
        num_threads: that compute it.
        num_threads_before: the same before it stopped; None for a training that begins.
        is_source: whether the model may have been made from its teacher, by what its folder says.
        references: losses of the held-out text to measure by.
        curve: so far.

    Raises:
        KvistError: a model, a text or an option cannot be used, or there is another training in `directory`.
    """

    def __init__(
        self,
        directory: Path,
        teacher: str | None,
        texts: Sequence[EvaluationText],
        config: UptrainConfig,
        *,
        held_out: EvaluationText | None = None,
        resume: bool = False,
        restart: bool = False,
        progress: Progress = no_progress,
    ) -> None:
        self._began_s = time.perf_counter()
        ready = prepare(directory, teacher, texts, config, held_out, resume=resume, restart=restart, progress=progress)
        self._directory, self._ready, self._config = directory, ready, ready.config
        self.references = ready.references
        self._restart = restart
        self._waits = restart and checkpoints.step_of_latest(directory) is not None  # until its own first has its place
        found = ready.found
        self.curve = found.curve() if found else Curve()
        self.step = found.step if found else 0
        self.saved_step = found.step if found else None
        self._seconds_before = found.seconds if found else 0.0
        self.learning_rate = ready.asked.learning_rate
        self.learning_rate_before = found.plan.asked.learning_rate if found else None
        self.num_threads = torch.get_num_threads()
        self.num_threads_before = found.plan.num_threads if found else None
        made_from = ConversionRecord.read(directory)
        self.is_source = ready.asked.teacher is None or made_from.is_made_from(ready.asked.teacher.files_hash)
        self._random = torch.get_rng_state()
        self._updating = False
        if found:
            self._plan = replace(found.plan, asked=ready.asked, num_threads=self.num_threads)
        else:
            self.curve.rows.append(CurveRow(step=0, validation_loss=self._validation_loss()))
            steps = self._planned_steps(progress)
            self._plan = TrainingPlan(secrets.token_hex(8), ready.asked, steps, self.num_threads)
        self.num_steps = self._plan.num_steps

    @property
    def seconds(self) -> float:
        """That the training took so far, all its runs together."""
        return self._seconds_before + time.perf_counter() - self._began_s

    def run(self, told: Callable[[CurveRow], None] = lambda row: None) -> UptrainResult:
        """Train to the end and replace the student's weights.

        An interrupt saves what is done and passes on; so `saved_step` says where a training with `resume` begins.

        Args:
            told: each step as it is done.

        Raises:
            NumericsError: a loss, a gradient or a weight is not a finite number. The last training checkpoint is kept.
            OptionError: a training checkpoint or the weights cannot be written, or another training is at work there.
        """
        with only_training(self._directory):
            if not self._restart and checkpoints.step_of_latest(self._directory) != self.saved_step:
                raise OptionError(f"another training was at work in {self._directory} meanwhile: begin again")
            return self._run(told)

    def _run(self, told: Callable[[CurveRow], None]) -> UptrainResult:
        self._ready.student.model.train()
        torch.set_rng_state(self._random)  # whatever was drawn since
        saved_s = time.perf_counter()
        try:
            while self.step < self.num_steps:
                told(self._one_step())
                if time.perf_counter() - saved_s >= 60 * self._config.save_minutes and self.step < self.num_steps:
                    self.save()
                    saved_s = time.perf_counter()
        except (KeyboardInterrupt, SystemExit):
            # Within an update weights and moments belong to different steps; then the one saved before stays, as it
            # does where the weights are of no use.
            if not self._updating and self.step > 0:
                with suppress(NumericsError):
                    self.save()
            raise
        return self._finish()

    def save(self) -> None:
        """Write a training checkpoint of the steps that are done.

        Raises:
            NumericsError: the training cannot go on from here. The one before is still there.
            OptionError: it cannot be written. The one before is still there.
        """
        if self.saved_step == self.step:
            return
        self._check_can_go_on()
        with uninterrupted():
            checkpoints.save(
                self._directory,
                self._plan,
                self.step,
                self.seconds,
                self._ready.trained,
                self._ready.optimizer,
                self._random,
                self.curve,
            )
            self.saved_step, self._waits = self.step, False

    def _check_can_go_on(self) -> None:
        """See that weights and moments are finite, as they are stored too, and one sequence's loss and gradient.

        A step may leave weights that are finite, and yet too large for any step to follow, or for the student's files.
        """
        states = (state for of_weight in self._ready.optimizer.state.values() for state in of_weight.values())
        if not all(tensor.isfinite().all() for tensor in (*self._ready.trained.values(), *states)):
            raise NumericsError(self._not_finite(self.step))
        check_storable(
            self._ready.folder.source,
            self._ready.student.model.state_dict(),
            f"{self._way_on()}, or convert the model from a source in a wider dtype",
        )
        random = torch.get_rng_state()
        try:
            self._compute_gradients(self._ready.judged[:1], self.step - 1)
        finally:
            torch.set_rng_state(random)

    def _planned_steps(self, progress: Progress) -> int:
        """The steps of the schedule: as asked for, or as many as fit into the minutes.

        The first steps are taken with a rate of 0 and forgotten, to see how long one is.
        """
        if self._config.steps is not None:
            return self._config.steps
        assert self._config.minutes is not None
        random, spent = torch.get_rng_state(), []
        self._ready.student.model.train()
        for step in range(_PROBED_STEPS):
            progress("timing a step", step, _PROBED_STEPS)
            began_s = time.perf_counter()
            self._compute_gradients(self._batch(step), step)
            self._update(0.0)
            spent.append(time.perf_counter() - began_s)
        self._ready.optimizer.state.clear()
        torch.set_rng_state(random)
        began_s = time.perf_counter()
        self._validation_loss()
        judging_s = (_VALIDATIONS + 1) * (time.perf_counter() - began_s)
        left_s = 60 * self._config.minutes - (time.perf_counter() - self._began_s) - judging_s
        steps = min(MOST_STEPS, int(left_s / statistics.median(spent[1:])))
        if steps < 1:
            raise OptionError(
                f"minutes is {self._config.minutes:g}, and to load, judge and take one step needs more: give "
                f"--minutes {math.ceil(1.2 * (self._config.minutes * 60 - left_s + 10 * spent[-1]) / 60):g} or more"
            )
        return steps

    def _one_step(self) -> CurveRow:
        rate = learning_rate(self.step, self.num_steps, self.learning_rate)
        began_s = time.perf_counter()
        losses = self._compute_gradients(self._batch(self.step), self.step)
        with uninterrupted():
            self._updating = True
            self._update(rate)
            self._random = torch.get_rng_state()
            self.step += 1
            seconds = time.perf_counter() - began_s
            tokens = self._config.batch * self._config.sequence
            row = CurveRow(step=self.step, **asdict(losses), learning_rate=rate, tokens_per_s=tokens / seconds)
            self.curve.rows.append(row)
            self._updating = False
        if (self.step - 1) * _VALIDATIONS // self.num_steps != self.step * _VALIDATIONS // self.num_steps:
            row = replace(row, validation_loss=self._validation_loss())
            self.curve.rows[-1] = row
        return row

    def _batch(self, step: int) -> torch.Tensor:
        return self._ready.text.batch(step, self._config.batch)

    def _compute_gradients(self, token_ids: torch.Tensor, step: int) -> StepLosses:
        """Those of sequences `[B, L]` by a step's positions, in place of what was there."""
        self._ready.optimizer.zero_grad(set_to_none=True)
        positions = torch.arange(step % self._config.every, self._config.sequence, self._config.every)
        losses = backward(self._ready.student, self._ready.teacher, token_ids, positions, self._config)
        norm = torch.nn.utils.clip_grad_norm_(self._ready.trained.values(), _MOST_GRADIENT)
        if not (math.isfinite(losses.loss) and norm.isfinite()):
            raise NumericsError(self._not_finite(step + 1))
        return losses

    def _not_finite(self, step: int) -> str:
        if self.step == 0:  # no rate had a part in it
            return (
                f"the loss of {self._directory} is not a finite number before it is trained: convert it again, or give "
                "its losses lower weights"
            )
        return f"the loss of step {step:,} is not a finite number: {self._way_on()}"

    def _way_on(self) -> str:
        """What to do where the weights are of no use any more."""
        if self.saved_step:
            kept = f"the training checkpoint of step {self.saved_step} is kept: go on from it with --resume and"
        elif self._waits:
            kept = (
                f"{self._directory} and the training checkpoint in it are as they were: start again with --restart and"
            )
        else:
            kept = f"{self._directory} is as it was: start again with"
        return f"{kept} a lower rate, like --learning-rate {self.learning_rate / 3:.1g}"

    def _update(self, rate: float) -> None:
        for group in self._ready.optimizer.param_groups:
            group["lr"] = rate
        self._ready.optimizer.step()

    def _validation_loss(self) -> float:
        self._ready.student.model.eval()
        loss = text_loss(self._ready.student, self._ready.judged, self._config.batch)
        self._ready.student.model.train()
        if not math.isfinite(loss):
            raise NumericsError(self._not_finite(self.step))
        return loss

    def _finish(self) -> UptrainResult:
        """Replace the weights, write down what was done, and only then drop the training checkpoint."""
        if self.curve.rows[-1].validation_loss is None:  # an interrupt came between the last step and its judgement
            self.curve.rows[-1] = replace(self.curve.rows[-1], validation_loss=self._validation_loss())
        self.save()  # a disk that is full now must not cost the training
        validations = self.curve.validations
        result = UptrainResult(
            steps=self.num_steps,
            tokens=self.num_steps * self._config.batch * self._config.sequence,
            seconds=self.seconds,
            loss_before=validations[0][1],
            loss_after=validations[-1][1],
            references=self.references,
            curve=self.curve,
        )
        with uninterrupted():
            replace_weights(self._ready.folder.source, self._ready.student.model.state_dict())
            self.curve.replace(self._directory / CURVE_FILE)
            add_training(self._directory, self._plan.training_id, self._record() | result.facts())
            checkpoints.remove_all(self._directory)
        return result

    def _record(self) -> dict[str, object]:
        """What `conversion.json` says of the training, besides what it came to."""
        asked = self._plan.asked
        return {
            "teacher": asked.teacher and asked.teacher.name,
            "texts": [asdict(text) for text in asked.texts],
            "text_tokens": self._ready.text.num_tokens,
            "held_out": asked.held_out.name if asked.held_out else "the last part of the texts",
            "held_out_tokens": self._ready.judged.numel(),
            "minutes": asked.minutes,
            "settings": asked.settings | {"learning_rate": asked.learning_rate},
        }
