"""All that a training needs before its first step: checked first, since what fails later has cost its time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kvist.convert import uptrain_checkpoint as checkpoints
from kvist.convert.bigram import BigramModel
from kvist.convert.uptrain_checkpoint import TrainingCheckpoint
from kvist.convert.uptrain_checks import check_resume, check_same, check_space, check_student, check_teacher
from kvist.convert.uptrain_compute import autocast_of, resolved_compute
from kvist.convert.uptrain_config import DEFAULT_LEARNING_RATE, UptrainConfig
from kvist.convert.uptrain_finish import trained_tensors
from kvist.convert.uptrain_folder import ModelFolder
from kvist.convert.uptrain_losses import text_loss
from kvist.convert.uptrain_models import Trained, load_model
from kvist.convert.uptrain_plan import AskedTraining, TeacherId, TextId, settings_of
from kvist.convert.uptrain_student import student_hash
from kvist.convert.uptrain_text import PackedText, joined_tokens, judged_sequences, packed_texts
from kvist.evaluate.text_windows import EvaluationText
from kvist.loading.progress import Progress

_BETAS = (0.9, 0.95)


@dataclass(frozen=True)
class Prepared:
    """A training that can begin, or go on: weights, moments and PyTorch's random numbers are as they then must be.

    Attributes:
        folder: of the student.
        config: how; rate and `compute` as they are used.
        found: what it goes on from; None where it begins.
        asked: what is asked for. A training that goes on was asked for the same, but for its rate.
        text: what is trained on.
        judged: what the validation loss is of, `[B, L]` int64.
        student: what learns, in fp32.
        teacher: what it learns from; None where the text's loss alone counts.
        trained: the student's weights that change, by name.
        optimizer: of them.
        references: losses of `judged` to measure by, by name.
    """

    folder: ModelFolder
    config: UptrainConfig
    found: TrainingCheckpoint | None
    asked: AskedTraining
    text: PackedText
    judged: torch.Tensor
    student: Trained
    teacher: Trained | None
    trained: dict[str, torch.nn.Parameter]
    optimizer: torch.optim.Optimizer
    references: dict[str, float]


def prepare(
    directory: Path,
    teacher: str | None,
    texts: Sequence[EvaluationText],
    config: UptrainConfig,
    held_out: EvaluationText | None,
    *,
    resume: bool,
    restart: bool,
    progress: Progress,
) -> Prepared:
    """Prepare a training; arguments and errors as of `Uptraining`."""
    found = None if restart else checkpoints.latest(directory)
    check_resume(directory, found, resume, config)
    config = _settled(config, found)
    folder = ModelFolder.student(directory)
    check_student(folder, texts, config)
    source = None if teacher is None else ModelFolder.find(teacher, progress)
    if source is not None:
        check_teacher(folder, source, texts)
    asked = _asked(config, folder, source, texts, held_out, progress)
    if found:
        check_same(found, asked)
        asked = replace(found.plan.asked, learning_rate=asked.learning_rate)
    text, apart = _packed(folder, texts, held_out, config)
    judged = judged_sequences(apart, config.sequence)

    progress("loading the models", 0, None)
    autocast = autocast_of(config.compute)
    dtype = torch.bfloat16 if config.compute == "bf16" else torch.float32
    taught_by = None if source is None else load_model(source, dtype, autocast)
    student = load_model(folder, torch.float32, autocast)
    trained_tensors(folder.source, student.model.state_dict())  # that the end can write them, before the time is spent
    if config.gradient_checkpointing:
        student.model.activation_checkpointing_enable({"use_reentrant": False})
    trained = student.choose_trained(config.train)
    check_space(folder, checkpoints.checkpoint_bytes(trained), found, config.train)
    optimizer = _optimizer(trained, config.weight_decay)
    references = _references(text, judged, student, taught_by, config.batch, progress)
    torch.manual_seed(config.seed)
    if found:
        found.restore(trained, optimizer)
    return Prepared(folder, config, found, asked, text, judged, student, taught_by, trained, optimizer, references)


def _settled(config: UptrainConfig, found: TrainingCheckpoint | None) -> UptrainConfig:
    """The options with rate and `compute` as they are used: where none are given, those that a training had before."""
    rate = config.learning_rate
    if rate is None:
        rate = found.plan.asked.learning_rate if found else DEFAULT_LEARNING_RATE
    kept = str(found.plan.asked.settings["compute"]) if found and config.compute == "auto" else config.compute
    return replace(config, learning_rate=rate, compute=resolved_compute(kept))


def _asked(
    config: UptrainConfig,
    student: ModelFolder,
    teacher: ModelFolder | None,
    texts: Sequence[EvaluationText],
    held_out: EvaluationText | None,
    progress: Progress,
) -> AskedTraining:
    assert config.learning_rate is not None
    return AskedTraining(
        settings=settings_of(config),
        learning_rate=config.learning_rate,
        steps=config.steps,
        minutes=config.minutes,
        teacher=None if teacher is None else TeacherId(teacher.name, teacher.source.files_hash(progress)),
        texts=tuple(map(TextId.of, texts)),
        held_out=None if held_out is None else TextId.of(held_out),
        student_hash=student_hash(student, config.train, progress),
    )


def _packed(
    folder: ModelFolder, texts: Sequence[EvaluationText], held_out: EvaluationText | None, config: UptrainConfig
) -> tuple[PackedText, PackedText]:
    vocab_size = folder.config.vocab_size
    token_ids = joined_tokens(folder.tokenizer, texts, vocab_size)
    apart = None if held_out is None else joined_tokens(folder.tokenizer, [held_out], vocab_size)
    return packed_texts(folder.tokenizer, token_ids, apart, config.sequence, config.seed)


def _optimizer(trained: dict[str, torch.nn.Parameter], weight_decay: float) -> torch.optim.Optimizer:
    """AdamW with weight decay for matrices; each step sets its own rate."""
    matrices = [parameter for parameter in trained.values() if parameter.dim() > 1]
    vectors = [parameter for parameter in trained.values() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], betas=_BETAS, fused=True)


def _references(
    text: PackedText, judged: torch.Tensor, student: Trained, teacher: Trained | None, batch: int, progress: Progress
) -> dict[str, float]:
    found = {"bigram model": BigramModel(text.token_ids, student.vocab_size).loss(judged)}
    if teacher is not None:
        progress("judging the teacher", 0, None)
        found["teacher"] = text_loss(teacher, judged, batch)
    return found
