"""What makes a training the one that it is: one that goes on must have the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from kvist.checks import check_integer, check_number
from kvist.convert.uptrain_config import COMPUTE, UptrainConfig
from kvist.errors import shown
from kvist.evaluate.text_windows import EvaluationText

# How long and how often decide nothing that is computed. The rate is kept apart: a training that ran into NaN goes on
# with a lower one.
_APART = ("steps", "minutes", "save_minutes", "learning_rate")


@dataclass(frozen=True)
class TextId:
    """Which text: the name of its file, and the SHA-256 of its bytes, which alone decides."""

    name: str
    sha256: str

    @classmethod
    def of(cls, text: EvaluationText) -> TextId:
        return cls(text.name, text.sha256)


@dataclass(frozen=True)
class TeacherId:
    """Which teacher: what it goes by, and the hash of its files, which alone decides."""

    name: str
    files_hash: str


@dataclass(frozen=True)
class AskedTraining:
    """A training as it was asked for.

    Attributes:
        settings: the options that decide the outcome, `compute` as resolved.
        learning_rate: the highest of the schedule.
        steps: how many; None where `minutes` says it, or what a training that goes on had.
        minutes: that it may take; None where its steps were asked for.
        teacher: what it learns from; None where the text's loss alone counts.
        texts: that are trained on, in order.
        held_out: what is judged on alone; None where that is the last part of `texts`.
        student_hash: of the student as far as training leaves it as it is.
    """

    settings: dict[str, object]
    learning_rate: float
    steps: int | None
    minutes: float | None
    teacher: TeacherId | None
    texts: tuple[TextId, ...]
    held_out: TextId | None
    student_hash: str


@dataclass(frozen=True)
class TrainingPlan:
    """A training as it is done.

    Attributes:
        training_id: which tells it from all others, also from one that is asked for in the same words.
        asked: as it was asked for.
        num_steps: of the schedule.
        num_threads: that compute it.
    """

    training_id: str
    asked: AskedTraining
    num_steps: int
    num_threads: int

    @classmethod
    def parsed(cls, raw: object) -> TrainingPlan:
        """What `as_json` gave.

        Raises:
            ValueError: it is damaged.
        """
        found = _mapping(raw, {each.name for each in fields(cls)})
        return cls(
            _text("training_id", found["training_id"]),
            _asked(found["asked"]),
            check_integer("num_steps", found["num_steps"], 1),
            check_integer("num_threads", found["num_threads"], 1),
        )

    def as_json(self) -> dict[str, object]:
        return asdict(self)

    def differences(self, now: AskedTraining) -> list[str]:
        """What a training that is to go on has other than before, in words; empty where nothing.

        The rate may be another, and the length need not be said again.
        """
        before = self.asked
        found = [
            f"{name} was {shown(before.settings[name])} and is {shown(value)}"
            for name, value in now.settings.items()
            if before.settings[name] != value
        ]
        if [text.sha256 for text in before.texts] != [text.sha256 for text in now.texts]:
            found.append("the texts are others, or in another order")
        if (before.held_out and before.held_out.sha256) != (now.held_out and now.held_out.sha256):
            found.append("what is held out is another text")
        if (before.teacher and before.teacher.files_hash) != (now.teacher and now.teacher.files_hash):
            names = [teacher.name if teacher else "none" for teacher in (before.teacher, now.teacher)]
            found.append(f"the teacher was {names[0]} and is {names[1]}, or its files changed")
        if before.student_hash != now.student_hash:
            found.append("the model that is trained is another, or its files changed")
        if now.steps is not None and now.steps != self.num_steps:
            found.append(f"steps was {self.num_steps} and is {now.steps}")
        if now.minutes is not None and now.minutes != before.minutes:
            was = f"minutes was {before.minutes:g}" if before.minutes else f"{self.num_steps} steps were asked for"
            found.append(f"{was} and now minutes is {now.minutes:g}")
        return found


def settings_of(config: UptrainConfig) -> dict[str, object]:
    """The options that decide what comes out, but for the learning rate."""
    return {name: value for name, value in vars(config).items() if name not in _APART}


def _asked(raw: object) -> AskedTraining:
    found = _mapping(raw, {each.name for each in fields(AskedTraining)})
    settings = _mapping(found["settings"], set(settings_of(UptrainConfig(steps=1))))
    if settings["compute"] not in COMPUTE[1:]:
        raise ValueError(f"compute is {shown(settings['compute'])}")
    texts, held_out, teacher = found["texts"], found["held_out"], found["teacher"]
    steps, minutes = found["steps"], found["minutes"]
    if not isinstance(texts, list) or not texts:
        raise ValueError(f"texts is {shown(texts)}")
    return AskedTraining(
        settings,
        check_number("learning_rate", found["learning_rate"], 0, open_low=True),
        None if steps is None else check_integer("steps", steps, 1),
        None if minutes is None else check_number("minutes", minutes, 0, open_low=True),
        None if teacher is None else TeacherId(*_texts(teacher, "name", "files_hash")),
        tuple(TextId(*_texts(text, "name", "sha256")) for text in texts),
        None if held_out is None else TextId(*_texts(held_out, "name", "sha256")),
        _text("student_hash", found["student_hash"]),
    )


def _mapping(raw: object, names: set[str]) -> dict[str, object]:
    if not isinstance(raw, Mapping) or raw.keys() != names:
        raise ValueError(f"it holds {shown(raw)}")
    return dict(raw)


def _text(name: str, raw: object) -> str:
    if not isinstance(raw, str):
        raise ValueError(f"{name} is {shown(raw)}")
    return raw


def _texts(raw: object, *names: str) -> list[str]:
    found = _mapping(raw, set(names))
    return [_text(name, found[name]) for name in names]
