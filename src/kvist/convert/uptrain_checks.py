"""What a training refuses before anything is loaded, or before it takes its first step."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from kvist.convert.uptrain_checkpoint import TrainingCheckpoint, TrainingPlan, differences
from kvist.convert.uptrain_config import UptrainConfig
from kvist.convert.uptrain_finish import stored_tensors
from kvist.convert.uptrain_models import ModelFolder
from kvist.errors import ContextFullError, OptionError
from kvist.evaluate.text_windows import EvaluationText
from kvist.memory import distinct_sizes


def check_resume(directory: Path, found: TrainingCheckpoint | None, resume: bool) -> None:
    """Refuse to begin where a training waits to go on, and to go on where there is none."""
    if found and not resume:
        raise OptionError(
            f"{directory} holds a training that stopped after step {found.step:,} of {found.plan.num_steps:,}: go on "
            "with --resume, or drop it with --restart"
        )
    if resume and not found:
        raise OptionError(f"there is no training checkpoint in {directory}: leave --resume out")


def check_student(student: ModelFolder, texts: Sequence[EvaluationText], config: UptrainConfig) -> None:
    """Refuse what the student cannot be trained with."""
    if not texts:
        raise OptionError("there is no text to train on: give --text FILE")
    if config.sequence > student.config.max_context:
        raise ContextFullError(
            f"sequences of {config.sequence:,} tokens exceed the model's context of {student.config.max_context:,}: "
            "take shorter ones"
        )
    stored_tensors(student.path)


def check_teacher(student: ModelFolder, teacher: ModelFolder, texts: Sequence[EvaluationText]) -> None:
    """Refuse a teacher that the student cannot learn from: it has another vocabulary, or other layers."""
    ours, theirs, advice = student.config, teacher.config, "take the model that it was converted from"
    if student.path == teacher.path.absolute():
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


def check_same(found: TrainingCheckpoint, plan: TrainingPlan, config: UptrainConfig) -> None:
    """Refuse to go on with other options than before."""
    changed = differences(found.plan, plan)
    if config.steps is not None and config.steps != found.plan.num_steps:
        changed.append(f"steps was {found.plan.num_steps} and is {config.steps}")
    if changed:
        raise OptionError(
            f"the training in {found.path.parent} cannot go on: {'; '.join(changed)}: give the same options, or "
            "--restart"
        )


def check_space(directory: Path, checkpoint_bytes: int) -> None:
    """Refuse a disk that would fill: two training checkpoints lie there for a moment, or one and the new weights."""
    needed, free = 2 * checkpoint_bytes, shutil.disk_usage(directory).free
    if needed > free:
        takes, has = distinct_sizes(needed, free)
        raise OptionError(
            f"training checkpoints in {directory} take {takes}, and {has} are free on its disk: free some, or train "
            "fewer weights with --train attention"
        )
