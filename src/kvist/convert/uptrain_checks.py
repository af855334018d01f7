"""What a training refuses before anything is loaded, or before it takes its first step."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvist.convert.record import ConversionRecord
from kvist.convert.uptrain_checkpoint import TrainingCheckpoint
from kvist.convert.uptrain_config import UptrainConfig
from kvist.convert.uptrain_folder import ModelFolder
from kvist.convert.uptrain_plan import AskedTraining
from kvist.errors import ContextFullError, OptionError
from kvist.evaluate.text_windows import EvaluationText
from kvist.memory import available_bytes, distinct_sizes


@contextmanager
def only_training(directory: Path) -> Iterator[None]:
    """Be the one training of a folder until the end of the block, or of the process.

    Raises:
        OptionError: another process, or another training of this one, is at work there.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise OptionError(
                f"another training is at work in {directory}: wait for its end, or train a copy of the folder"
            ) from None
        yield
    finally:
        os.close(descriptor)


def check_resume(directory: Path, found: TrainingCheckpoint | None, resume: bool, config: UptrainConfig) -> None:
    """Refuse to begin where a training waits to go on, to go on where there is none, and to begin for no length."""
    if found and not resume:
        raise OptionError(
            f"{directory} holds a training that stopped after step {found.step:,} of {found.plan.num_steps:,}: go on "
            "with --resume, or begin anew with --restart"
        )
    if resume and not found:
        raise OptionError(f"there is no training checkpoint in {directory}: leave --resume out")
    if not found and config.steps is None and config.minutes is None:
        raise OptionError("give either steps or minutes: one of them says how long to train")


def check_student(student: ModelFolder, texts: Sequence[EvaluationText], config: UptrainConfig) -> None:
    """Refuse what the student cannot be trained with, or what could not be written at the end."""
    if not texts:
        raise OptionError("there is no text to train on: give --text FILE")
    if config.sequence > student.config.max_context:
        raise ContextFullError(
            f"sequences of {config.sequence:,} tokens exceed the model's context of {student.config.max_context:,}: "
            "take shorter ones"
        )
    # Beside the models at least each layer's inputs lie in memory, in float32.
    needed = 4 * config.batch * config.sequence * student.config.embed_dim * student.config.num_layers
    if needed > (free := available_bytes()):
        taken, left = distinct_sizes(needed, free)
        raise OptionError(
            f"the hidden states of {config.batch:,} sequences of {config.sequence:,} tokens take {taken} at least, and "
            f"{left} of memory are free: take a smaller --batch"
        )
    ConversionRecord.read(student.path)


def check_teacher(student: ModelFolder, teacher: ModelFolder, texts: Sequence[EvaluationText]) -> None:
    """Refuse a teacher that the student cannot learn from: it has another vocabulary, or other layers."""
    ours, theirs, advice = student.config, teacher.config, "take the model that it was converted from"
    if student.path.resolve() == teacher.path.resolve():
        raise OptionError(f"the teacher is {student.path} itself: {advice}")
    if ours.vocab_size != theirs.vocab_size:
        raise OptionError(
            f"the teacher {teacher.name} has another vocabulary than {student.path}, {theirs.vocab_size:,} tokens "
            f"against {ours.vocab_size:,}: {advice}"
        )
    if any(student.tokenizer.encode(text.text) != teacher.tokenizer.encode(text.text) for text in texts):
        raise OptionError(
            f"the teacher {teacher.name} has another vocabulary than {student.path}, so that the text is other tokens "
            f"to it: {advice}"
        )
    if (ours.num_layers, ours.embed_dim) != (theirs.num_layers, theirs.embed_dim):
        raise OptionError(
            f"the teacher {teacher.name} has {theirs.num_layers} layers of {theirs.embed_dim}, and {student.path} "
            f"{ours.num_layers} of {ours.embed_dim}: {advice}"
        )


def check_same(found: TrainingCheckpoint, asked: AskedTraining) -> None:
    """Refuse to go on with other options than before."""
    if changed := found.plan.differences(asked):
        raise OptionError(
            f"the training in {found.path.parent} cannot go on: {'; '.join(changed)}: give the same options, or "
            "--restart"
        )


def check_space(student: ModelFolder, checkpoint_bytes: int, found: TrainingCheckpoint | None, train: str) -> None:
    """Refuse a disk that would fill: two training checkpoints lie there for a moment, or one and the new weights."""
    weights = sum(tensor.num_bytes for tensor in student.source.checkpoint.all_stored)
    there = checkpoint_bytes if found else 0
    needed, free = checkpoint_bytes + max(checkpoint_bytes, weights) - there, shutil.disk_usage(student.path).free
    if needed > free:
        takes, has = distinct_sizes(needed, free)
        fewer = ", or train fewer weights with --train attention" if train == "all" else ""
        raise OptionError(
            f"training checkpoints and new weights in {student.path} take {takes}, and {has} are free on its disk: "
            f"free some{fewer}"
        )
