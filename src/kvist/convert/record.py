"""The file `conversion.json` beside a model's weights: what a conversion did, and what was trained since.

Anybody may have written the one that is read, so its form is checked, here alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

from kvist.checks import is_finite_number
from kvist.errors import ModelFileError, OptionError, shown
from kvist.loading.cache_folder import move_into_place
from kvist.loading.untrusted_file import read_json, write_json

CONVERSION_FILE = "conversion.json"
RECORD_ASIDE = f".{CONVERSION_FILE}.partial"
"""What it is called while it is written."""

_TRAININGS, _TRAINING_ID = "uptraining", "id"
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class LayerConversion:
    """What became of a layer's heads.

    Attributes:
        groups: the source's KV heads that became each of the new ones.
        missed: the share of the square of its attention's output that it misses on the calibration text.
    """

    groups: tuple[tuple[int, ...], ...]
    missed: float


@dataclass(frozen=True)
class Conversion:
    """What was done.

    Attributes:
        conversion: `gqa` or `expand`.
        source: what the source goes by.
        source_hash: of its weights and configuration; of a GGUF file, of the whole file.
        model_type, num_heads: of both.
        source_num_kv_heads, num_kv_heads: before and after.
        method: how heads were merged; None for `expand`.
        calibration: the text, and how much of it; None where no method looked at one.
        layers: what became of each, where a method looked at them.
        earlier: what the source's own `conversion.json` says, where it has one.
    """

    conversion: str
    source: str
    source_hash: str
    model_type: str
    num_heads: int
    source_num_kv_heads: int
    num_kv_heads: int
    method: str | None = None
    calibration: Mapping[str, object] | None = None
    layers: tuple[LayerConversion, ...] = ()
    earlier: Mapping[str, object] | None = None

    def as_json(self) -> dict[str, object]:
        """The same as plain values, with Kvist's version; what there is none of is left out."""
        fields = {"kvist": version("kvist"), **_without_none(asdict(self))}
        fields["layers"] = [_without_none(asdict(layer)) for layer in self.layers]
        return fields if self.layers else {name: value for name, value in fields.items() if name != "layers"}

    def write(self, directory: Path) -> None:
        write_json(directory / CONVERSION_FILE, self.as_json())


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
        fields: all that is said.
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
    fields: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class ConversionRecord:
    """What the file of a model's folder says.

    Attributes:
        fields: all of it; empty where there is no such file.
        method: how heads were merged; None where that is not said.
        trainings: that came to their end, in order.
        source_hash: of the files that it was made from; None where that is not said.
    """

    fields: dict[str, object] = field(default_factory=dict)
    method: str | None = None
    trainings: tuple[TrainingRecord, ...] = ()
    source_hash: str | None = None

    def is_made_from(self, files_hash: str) -> bool:
        """Whether a checkpoint of this hash may be the source; it may, where that is not said."""
        return self.source_hash in (None, files_hash)

    @property
    def training(self) -> TrainingRecord | None:
        """The last one; None where there was none."""
        return self.trainings[-1] if self.trainings else None

    @classmethod
    def read(cls, directory: Path) -> ConversionRecord:
        """That of a model's folder.

        Raises:
            ModelFileError: it is damaged, or of another form than a conversion writes.
        """
        path, advice = directory / CONVERSION_FILE, "convert the model again, or delete the file"
        if not path.exists():
            return cls()
        fields = read_json(path)
        try:
            record = cls(
                fields,
                _taken(fields, "method", _text),
                _taken(fields, _TRAININGS, _trainings) or (),
                _taken(fields, "source_hash", _text),
            )
            json.dumps(fields, allow_nan=False)
        except _FormError as error:
            raise ModelFileError(f"{path} {error}: {advice}") from None
        except RecursionError:
            raise ModelFileError(f"{path} is nested too deeply: {advice}") from None
        except ValueError:
            raise ModelFileError(f"{path} holds a number that is not finite: {advice}") from None
        return record


def add_training(directory: Path, training_id: str, entry: Mapping[str, object]) -> None:
    """Write down what was trained; what else stands there stays. Done again for the same training, it changes nothing.

    Args:
        directory: of the model.
        training_id: which tells the training from all others.
        entry: what is said of it.

    Raises:
        ModelFileError: what is there is damaged.
        OptionError: it cannot be written. What was there is as it was.
    """
    record = ConversionRecord.read(directory)
    others = [dict(each.fields) for each in record.trainings if each.fields.get(_TRAINING_ID) != training_id]
    fields = {**record.fields, _TRAININGS: [*others, {_TRAINING_ID: training_id, **entry}]}
    replace_file(directory / CONVERSION_FILE, directory / RECORD_ASIDE, lambda aside: write_json(aside, fields))


def replace_file(path: Path, aside: Path, write: Callable[[Path], object]) -> None:
    """Write a file of a model's folder aside, and give it its name.

    Raises:
        OptionError: it cannot be written. What was there is as it was.
    """
    try:
        write(aside)
        move_into_place(aside, path)
    except OSError as error:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise OptionError(
            f"{path} cannot be written: {error.strerror or error}; free some space, then give --resume"
        ) from error


class _FormError(Exception):
    """A field has a value that it cannot have; how the sentence about the file goes on."""


def _trainings(value: object) -> tuple[TrainingRecord, ...] | None:
    if not isinstance(value, list):
        return None
    for training in value:
        if not isinstance(training, dict):
            raise _FormError(f"cannot be used, an uptraining in it is {shown(training)}")
    return tuple(map(_training, value))


def _training(fields: Mapping[str, object]) -> TrainingRecord:
    judged = {name: _taken(fields, f"loss_{name}", _number) for name in ("before", "after")}
    references = _taken(fields, "references", _numbers) or {}
    return TrainingRecord(
        texts=_taken(fields, "texts", _names) or (),
        text_tokens=_taken(fields, "text_tokens", _number),
        held_out=_taken(fields, "held_out", _text),
        held_out_tokens=_taken(fields, "held_out_tokens", _number),
        steps=_taken(fields, "steps", _number),
        tokens=_taken(fields, "tokens", _number),
        seconds=_taken(fields, "seconds", _number),
        losses={name: loss for name, loss in judged.items() if loss is not None} | references,
        references=references,
        machine=_taken(fields, "machine", _text),
        fields=fields,
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
    return float(value) if is_finite_number(value) else None


def _numbers(value: object) -> dict[str, float] | None:
    if not isinstance(value, dict) or not all(map(is_finite_number, value.values())):
        return None
    return {str(name): float(number) for name, number in value.items()}


def _names(value: object) -> tuple[str, ...] | None:
    """Of texts, each an object that says its name."""
    names = [text.get("name") if isinstance(text, dict) else None for text in value] if isinstance(value, list) else []
    found = tuple(name for name in names if isinstance(name, str))
    return found if isinstance(value, list) and len(found) == len(value) else None


def _without_none(fields: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in fields.items() if value is not None}
