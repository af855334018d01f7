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
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from kvist.convert import uptrain_checkpoint as checkpoints
from kvist.convert.bigram import BigramModel
from kvist.convert.uptrain_checkpoint import TrainingPlan
from kvist.convert.uptrain_checks import check_resume, check_same, check_space, check_student, check_teacher
from kvist.convert.uptrain_config import UptrainConfig
from kvist.convert.uptrain_curve import CURVE_FILE, Curve, CurveRow
from kvist.convert.uptrain_finish import add_record, replace_weights
from kvist.convert.uptrain_losses import StepLosses, backward, text_loss
from kvist.convert.uptrain_models import ModelFolder, autocast_of, load_model, resolved_compute
from kvist.convert.uptrain_result import UptrainResult
from kvist.convert.uptrain_schedule import learning_rate
from kvist.convert.uptrain_text import joined_tokens, judged_sequences, packed_texts
from kvist.engine.uninterrupted import uninterrupted
from kvist.errors import NumericsError, OptionError
from kvist.evaluate.text_windows import EvaluationText
from kvist.loading.fingerprint import FilesHash
from kvist.loading.progress import Progress, no_progress
from kvist.loading.safetensors_checkpoint import SafetensorsCheckpoint

_BETAS = (0.9, 0.95)
_MOST_GRADIENT = 1.0  # the norm that longer gradients are brought down to
_VALIDATIONS = 8  # over the whole training
_PROBED_STEPS = 3


class Uptraining:
    """A training, ready to run.

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
        references: losses of the held-out text to measure by.

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
        found = None if restart else checkpoints.latest(directory)
        check_resume(directory, found, resume)
        student = ModelFolder.student(directory)
        check_student(student, texts, config)
        source = None if teacher is None else ModelFolder.find(teacher, progress)
        if source is not None:
            check_teacher(student, source, texts)
        self._directory, self._config, self._texts, self._held_out_text = directory, config, texts, held_out
        token_ids = joined_tokens(student.tokenizer, texts, student.config.vocab_size)
        held_out_ids = joined_tokens(student.tokenizer, [held_out], student.config.vocab_size) if held_out else None
        self._text, self._held_out = packed_texts(
            student.tokenizer, token_ids, held_out_ids, config.sequence, config.seed
        )
        self._judged = judged_sequences(self._held_out, config.sequence)
        compute = found.plan.settings["compute"] if found and config.compute == "auto" else None
        self._compute = str(compute or resolved_compute(config.compute))
        self._load(directory, source, progress)
        self.curve = found.curve() if found else Curve()
        self.step = self._done_before = 0
        self._seconds_before = 0.0
        self.saved_step: int | None = None
        plan = self._plan(source, progress)
        if found:
            check_same(found, plan, config)
            found.restore(self._trained, self._optimizer)
            self.step = self._done_before = self.saved_step = found.step
            self._seconds_before = found.seconds
            plan = found.plan
        self.references = self._references(progress)
        self._random = torch.get_rng_state()
        self._updating = False
        if not found:
            self._judge_start()
            plan = replace(plan, num_steps=self._planned_steps(progress))
        self._training = plan
        self.num_steps = plan.num_steps

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
            NumericsError: a loss is not a finite number. The last training checkpoint is kept.
            OptionError: a training checkpoint or the weights cannot be written.
        """
        self._student.model.train()
        saved_s = time.perf_counter()
        try:
            while self.step < self.num_steps:
                told(self._one_step())
                if time.perf_counter() - saved_s >= 60 * self._config.save_minutes and self.step < self.num_steps:
                    self.save()
                    saved_s = time.perf_counter()
        except (KeyboardInterrupt, SystemExit):
            # Within an update weights and moments belong to different steps; then the one saved before stays.
            if not self._updating and self.step > 0:
                self.save()
            raise
        return self._finish()

    def save(self) -> None:
        """Write a training checkpoint of the steps that are done."""
        with uninterrupted():
            checkpoints.save(
                self._directory,
                self._training,
                self.step,
                self.seconds,
                self._trained,
                self._optimizer,
                self._random,
                self.curve,
            )
            self.saved_step = self.step

    def _load(self, directory: Path, source: ModelFolder | None, progress: Progress) -> None:
        progress("loading the models", 0, None)
        torch.manual_seed(self._config.seed)
        autocast = autocast_of(self._compute)
        dtype = torch.bfloat16 if self._compute == "bf16" else torch.float32
        self._teacher = None if source is None else load_model(source.path, dtype, autocast)
        self._student = load_model(directory, torch.float32, autocast)
        if self._config.gradient_checkpointing:
            self._student.model.activation_checkpointing_enable({"use_reentrant": False})
        self._trained = self._student.choose_trained(self._config.train)
        matrices = [parameter for parameter in self._trained.values() if parameter.dim() > 1]
        vectors = [parameter for parameter in self._trained.values() if parameter.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": self._config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=self._config.learning_rate, betas=_BETAS, fused=True
        )
        check_space(directory, checkpoints.checkpoint_bytes(self._trained))

    def _plan(self, source: ModelFolder | None, progress: Progress) -> TrainingPlan:
        return TrainingPlan(
            settings=checkpoints.settings_of(self._config, self._compute),
            teacher="none" if source is None else source.name,
            teacher_hash="" if source is None else _files_hash(source.path, progress),
            texts={text.name: text.sha256 for text in self._all_texts()},
            num_steps=self._config.steps or 0,
        )

    def _all_texts(self) -> list[EvaluationText]:
        return [*self._texts, *([self._held_out_text] if self._held_out_text else [])]

    def _references(self, progress: Progress) -> dict[str, float]:
        bigram = BigramModel(self._text.token_ids, self._student.vocab_size)
        found = {"bigram model": bigram.loss(self._judged)}
        if self._teacher is not None:
            progress("judging the teacher", 0, None)
            found["teacher"] = text_loss(self._teacher, self._judged, self._config.batch)
        return found

    def _judge_start(self) -> None:
        self.curve.rows.append(CurveRow(step=0, validation_loss=self._validation_loss()))

    def _planned_steps(self, progress: Progress) -> int:
        """The steps of the schedule: as asked for, or as many as fit into the minutes.

        The first steps are taken with a rate of 0 and forgotten, to see how long one is.
        """
        if self._config.steps is not None:
            return self._config.steps
        assert self._config.minutes is not None
        random, spent = torch.get_rng_state(), []
        self._student.model.train()
        for step in range(_PROBED_STEPS):
            progress("timing a step", step, _PROBED_STEPS)
            began_s = time.perf_counter()
            self._compute_gradients(step)
            self._update(0.0)
            spent.append(time.perf_counter() - began_s)
        self._optimizer.state.clear()
        torch.set_rng_state(random)
        began_s = time.perf_counter()
        self._validation_loss()
        judging_s = (_VALIDATIONS + 1) * (time.perf_counter() - began_s)
        left_s = 60 * self._config.minutes - (time.perf_counter() - self._began_s) - judging_s
        steps = int(left_s / statistics.median(spent[1:]))
        if steps < 1:
            raise OptionError(
                f"minutes is {self._config.minutes:g}, and to load, judge and take one step needs more: give "
                f"--minutes {math.ceil(10 * (self._config.minutes * 60 - left_s + 10 * spent[-1]) / 60) / 10:g} or more"
            )
        return steps

    def _one_step(self) -> CurveRow:
        rate = learning_rate(self.step, self.num_steps, self._config.learning_rate)
        began_s = time.perf_counter()
        losses = self._compute_gradients(self.step)
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
        if self.step % max(1, self.num_steps // _VALIDATIONS) == 0 or self.step == self.num_steps:
            row = replace(row, validation_loss=self._validation_loss())
            self.curve.rows[-1] = row
        return row

    def _compute_gradients(self, step: int) -> StepLosses:
        self._optimizer.zero_grad(set_to_none=True)
        positions = torch.arange(step % self._config.every, self._config.sequence, self._config.every)
        losses = backward(
            self._student, self._teacher, self._text.batch(step, self._config.batch), positions, self._config
        )
        norm = torch.nn.utils.clip_grad_norm_(self._trained.values(), _MOST_GRADIENT)
        if not (math.isfinite(losses.loss) and norm.isfinite()):
            raise NumericsError(self._not_finite(step + 1))
        return losses

    def _not_finite(self, step: int) -> str:
        if step == 0:
            return f"the loss of {self._directory} is not a finite number before it is trained: convert it again"
        kept = (
            f"the training checkpoint of step {self.saved_step} is kept: go on from it with --resume and"
            if self.saved_step
            else f"{self._directory} is as it was: start again with"
        )
        lower = f"{self._config.learning_rate / 3:.1g}"
        return f"the loss of step {step:,} is not a finite number: {kept} a lower rate, like --learning-rate {lower}"

    def _update(self, rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()

    def _validation_loss(self) -> float:
        self._student.model.eval()
        loss = text_loss(self._student, self._judged, self._config.batch)
        self._student.model.train()
        if not math.isfinite(loss):
            raise NumericsError(self._not_finite(self.step))
        return loss

    def _finish(self) -> UptrainResult:
        """Replace the weights, write down what was done, and only then drop the training checkpoint."""
        if self.curve.rows[-1].validation_loss is None:  # an interrupt came between the last step and its judgement
            self.curve.rows[-1] = replace(self.curve.rows[-1], validation_loss=self._validation_loss())
        if self.saved_step != self.step:  # a disk that is full now must not cost the training
            self.save()
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
            replace_weights(self._directory, self._student.model.state_dict())
            self.curve.write(self._directory / CURVE_FILE)
            add_record(self._directory, self._record() | result.facts())
            checkpoints.remove_all(self._directory)
        return result

    def _record(self) -> dict[str, object]:
        """What `conversion.json` says of the training, besides what it came to."""
        return {
            "teacher": self._training.teacher,
            "texts": [{"name": text.name, "sha256": text.sha256} for text in self._texts],
            "text_tokens": self._text.num_tokens,
            "held_out": self._held_out_text.name if self._held_out_text else "the last part of the texts",
            "held_out_tokens": self._judged.numel(),
            "settings": self._training.settings | {"learning_rate": self._config.learning_rate},
        }


def _files_hash(directory: Path, progress: Progress) -> str:
    return FilesHash((directory / "config.json", *SafetensorsCheckpoint(directory).files)).get(progress)
