"""What a model's folder says of how it was made. Anybody may have written it, so its form is checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

from kvist.checks import is_number
from kvist.convert.record import CONVERSION_FILE
from kvist.convert.uptrain_curve import CURVE_FILE, Curve
from kvist.errors import ModelFileError, shown
from kvist.loading.untrusted_file import read_json

_MOST_PRINTED = 200
_MOST_NUMBER = 1e300
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class TrainingRecord:
    """What is written down of a training; None, or nothing, where that is not said.

    Attributes:
        texts: names of those it was trained on.
        text_tokens, held_out_tokens: that they have, and that it was judged by.
        held_out: what these are from.
        steps, tokens, seconds: that it took.
        losses: nats per token of the held-out text: `before`, `after`, and the `references`.
        references: those of other models, by name.
        machine: that it ran on.
    """

    texts: tuple[str, ...] = ()
    text_tokens: float | None = None
    held_out: str | None = None
    held_out_tokens: float | None = None
    steps: float | None = None
    tokens: float | None = None
    seconds: float | None = None
    losses: Mapping[str, float] = field(default_factory=dict)
    references: Mapping[str, float] = field(default_factory=dict)
    machine: str | None = None


@dataclass(frozen=True)
class ConversionRecord:
    """What `conversion.json` says.

    Attributes:
        fields: all of it, unchecked; empty where there is no such file.
        method: how heads were merged; None where that is not said.
        training: the last one; None where there was none.
    """

    fields: dict[str, object]
    method: str | None
    training: TrainingRecord | None

    @classmethod
    def read(cls, directory: Path) -> ConversionRecord:
        """That of a model's folder.

        Raises:
            ModelFileError: it is damaged, or of another form than a conversion writes.
        """
        path = directory / CONVERSION_FILE
        if not path.is_file():
            return cls({}, None, None)
        fields = read_json(path)
        try:
            record = cls(fields, _taken(fields, "method", _text), _last_training(fields))
            json.dumps(fields, allow_nan=False)
        except _FormError as error:
            raise ModelFileError(f"{path} {error}: convert the model again, or delete the file") from None
        except (ValueError, RecursionError):
            raise ModelFileError(
                f"{path} holds a number that is not finite: convert the model again, or delete the file"
            ) from None
        return record


def read_curve(directory: Path) -> Curve | None:
    """The learning curve in a model's folder; None where there is none.

    Raises:
        ModelFileError: it is damaged.
    """
    path = directory / CURVE_FILE
    if not path.is_file():
        return None
    curve = Curve.read(path)
    if any(value is not None and not _is_finite(value) for row in curve.rows for value in asdict(row).values()):
        raise ModelFileError(f"{path} is no learning curve that can be read: delete it")
    return curve


def printable(text: str) -> str:
    """A text from a file for a report, which is printed too: on one line, no control characters, and not long."""
    plain = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text[:_MOST_PRINTED])
    return plain if len(text) <= _MOST_PRINTED else f"{plain}..."


class _FormError(Exception):
    """A field has a value that it cannot have; how the sentence about the file goes on."""


def _last_training(fields: Mapping[str, object]) -> TrainingRecord | None:
    trainings = _taken(fields, "uptraining", lambda value: value if isinstance(value, list) else None)
    if not trainings:
        return None
    last = trainings[-1]
    if not isinstance(last, dict):
        raise _FormError(f"cannot be used, its last uptraining is {shown(last)}")
    judged = {name: _taken(last, f"loss_{name}", _number) for name in ("before", "after")}
    references = _taken(last, "references", _numbers) or {}
    return TrainingRecord(
        texts=_taken(last, "texts", _names) or (),
        text_tokens=_taken(last, "text_tokens", _number),
        held_out=_taken(last, "held_out", _text),
        held_out_tokens=_taken(last, "held_out_tokens", _number),
        steps=_taken(last, "steps", _number),
        tokens=_taken(last, "tokens", _number),
        seconds=_taken(last, "seconds", _number),
        losses={name: loss for name, loss in judged.items() if loss is not None} | references,
        references=references,
        machine=_taken(last, "machine", _text),
    )


def _taken(fields: Mapping[str, object], name: str, parse: Callable[[object], _Value | None]) -> _Value | None:
    """A field's value; None where it is not there. `parse` gives None where it is of another form."""
    value = fields.get(name)
    if value is None:
        return None
    if (parsed := parse(value)) is None:
        raise _FormError(f"cannot be used, its {name} is {shown(value)}")
    return parsed


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _number(value: object) -> float | None:
    return float(value) if _is_finite(value) else None  # type: ignore[arg-type]


def _numbers(value: object) -> dict[str, float] | None:
    if not isinstance(value, dict) or not all(map(_is_finite, value.values())):
        return None
    return {str(name): float(number) for name, number in value.items()}


def _names(value: object) -> tuple[str, ...] | None:
    """Of texts, each an object that says its name."""
    names = [text.get("name") if isinstance(text, dict) else None for text in value] if isinstance(value, list) else []
    found = tuple(name for name in names if isinstance(name, str))
    return found if isinstance(value, list) and len(found) == len(value) else None


def _is_finite(value: object) -> bool:
    return is_number(value) and abs(value) < _MOST_NUMBER  # type: ignore[arg-type]
