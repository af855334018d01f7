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
class TrainingPlan:
    """A training as it was asked for.

    Attributes:
        settings: the options that decide the outcome, `compute` as resolved.
        learning_rate: the highest of the schedule.
        minutes: that it may take; None where its steps were asked for.
        teacher: its name.
        teacher_hash: of its files; empty without one.
        texts: that are trained on, in order.
        held_out: what is judged on alone; None where that is the last part of `texts`.
        num_steps: of the schedule; 0 until they are known.
    """

    settings: dict[str, object]
    learning_rate: float
    minutes: float | None
    teacher: str
    teacher_hash: str
    texts: tuple[TextId, ...]
    held_out: TextId | None
    num_steps: int

    @classmethod
    def parsed(cls, raw: object) -> TrainingPlan:
        """What `as_json` gave.

        Raises:
            ValueError: it is damaged.
        """
        found = _mapping(raw, {each.name for each in fields(cls)})
        settings = _mapping(found["settings"], set(settings_of(UptrainConfig(steps=1))))
        if settings["compute"] not in COMPUTE[1:]:
            raise ValueError(f"compute is {shown(settings['compute'])}")
        texts, held_out, minutes = found["texts"], found["held_out"], found["minutes"]
        if not isinstance(texts, list) or not texts:
            raise ValueError(f"texts is {shown(texts)}")
        return cls(
            settings,
            check_number("learning_rate", found["learning_rate"], 0, open_low=True),
            None if minutes is None else check_number("minutes", minutes, 0, open_low=True),
            _text("teacher", found["teacher"]),
            _text("teacher_hash", found["teacher_hash"]),
            tuple(map(_text_id, texts)),
            None if held_out is None else _text_id(held_out),
            check_integer("num_steps", found["num_steps"], 1),
        )

    def as_json(self) -> dict[str, object]:
        return asdict(self)

    def differences(self, now: TrainingPlan) -> list[str]:
        """What a training that is to go on has other than before, in words; empty where nothing.

        The rate may be another, and the length need not be said again.
        """
        found = [
            f"{name} was {shown(self.settings[name])} and is {shown(value)}"
            for name, value in now.settings.items()
            if self.settings[name] != value
        ]
        if [text.sha256 for text in self.texts] != [text.sha256 for text in now.texts]:
            found.append("the texts are others, or in another order")
        if (self.held_out and self.held_out.sha256) != (now.held_out and now.held_out.sha256):
            found.append("what is held out is another text")
        if self.teacher_hash != now.teacher_hash:
            found.append(f"the teacher was {self.teacher} and is {now.teacher}, or its files changed")
        if now.num_steps and now.num_steps != self.num_steps:
            found.append(f"steps was {self.num_steps} and is {now.num_steps}")
        if now.minutes is not None and now.minutes != self.minutes:
            was = f"{self.num_steps} steps were asked for" if self.minutes is None else f"minutes was {self.minutes:g}"
            found.append(f"{was} and now minutes is {now.minutes:g}")
        return found


def settings_of(config: UptrainConfig) -> dict[str, object]:
    """The options that decide what comes out, but for the learning rate."""
    return {name: value for name, value in vars(config).items() if name not in _APART}


def _mapping(raw: object, names: set[str]) -> dict[str, object]:
    if not isinstance(raw, Mapping) or raw.keys() != names:
        raise ValueError(f"it holds {shown(raw)}")
    return dict(raw)


def _text(name: str, raw: object) -> str:
    if not isinstance(raw, str):
        raise ValueError(f"{name} is {shown(raw)}")
    return raw


def _text_id(raw: object) -> TextId:
    found = _mapping(raw, {"name", "sha256"})
    return TextId(_text("name", found["name"]), _text("sha256", found["sha256"]))
