"""The learning curve: a row for each step, kept as JSON lines and drawn as a picture."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from kvist.checks import is_finite_number
from kvist.convert.record import replace_file
from kvist.errors import ModelFileError

CURVE_FILE = "uptraining.jsonl"
"""In the folder of a model that was trained."""

CURVE_ASIDE = f".{CURVE_FILE}.partial"
"""What it is called while it is written."""

_SIZE_INCHES = (7.0, 4.5)
_DPI = 150
# A step's loss jumps with its sequences: the line is a mean over this part of all steps.
_SMOOTHED_FRACTION = 0.04


@dataclass(frozen=True, kw_only=True)
class CurveRow:
    """A step.

    Attributes:
        step: how many are done with it; 0 before the first.
        loss, logits, attention, text: as in `StepLosses`; None where there was no such loss.
        learning_rate: of the step.
        tokens_per_s: of the step.
        validation_loss: nats per token of the held-out text after it; None where it was not judged.
    """

    step: int
    loss: float | None = None
    logits: float | None = None
    attention: float | None = None
    text: float | None = None
    learning_rate: float | None = None
    tokens_per_s: float | None = None
    validation_loss: float | None = None


@dataclass
class Curve:
    """The rows so far, steps ascending."""

    rows: list[CurveRow] = field(default_factory=list)

    @property
    def validations(self) -> list[tuple[int, float]]:
        """Steps and validation losses, where it was judged."""
        return [(row.step, row.validation_loss) for row in self.rows if row.validation_loss is not None]

    def write(self, path: Path) -> None:
        """One JSON object per row."""
        lines = [
            json.dumps({name: value for name, value in asdict(row).items() if value is not None}) for row in self.rows
        ]
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def replace(self, path: Path) -> None:
        """The same over what is there, at once.

        Raises:
            OptionError: it cannot be written. What was there is as it was.
        """
        replace_file(path, path.with_name(CURVE_ASIDE), self.write)

    @classmethod
    def read(cls, path: Path) -> Curve:
        """What `write` wrote; `ModelFileError` if it is damaged."""
        known = {each.name for each in fields(CurveRow)}
        try:
            found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            curve = cls([CurveRow(**{name: row[name] for name in known & row.keys()}) for row in found])
            if not all(
                value is None or is_finite_number(value) for row in curve.rows for value in asdict(row).values()
            ):
                raise ValueError
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ModelFileError(f"{path} is no learning curve that can be read: delete it") from error
        return curve


def read_curve(directory: Path) -> Curve | None:
    """The learning curve in a model's folder; None where there is none.

    Raises:
        ModelFileError: it is damaged.
    """
    path = directory / CURVE_FILE
    return Curve.read(path) if path.is_file() else None


def draw_curve(path: Path, kind: str, curve: Curve, references: dict[str, float], title: str) -> None:
    """Draw the loss over the steps, and below it the loss on the held-out text beside what it is measured by.

    Args:
        path: of the file, whatever its ending.
        kind: as `evaluate.plot.check_plot` gives it.
        curve: what is drawn.
        references: losses to compare with, by name: of the teacher, of a bigram model.
        title: above the picture.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    steps = [(row.step, row.loss) for row in curve.rows if row.loss is not None]
    if steps:
        x, y = zip(*steps, strict=True)
        above.plot(x, y, color="tab:blue", alpha=0.3, linewidth=0.8, label="of each step")
        above.plot(x, _smoothed(list(y)), color="tab:blue", label="mean")
        above.legend(fontsize="small")
    above.set_ylabel("training loss")
    if curve.validations:
        x, y = zip(*curve.validations, strict=True)
        below.plot(x, y, "o-", color="tab:orange", label="student")
    for number, (name, loss) in enumerate(references.items()):
        below.axhline(loss, linestyle="--", linewidth=1, color=f"C{number + 2}", label=name)
    below.legend(fontsize="small")
    below.set_ylabel("nats per token, held out")
    below.set_xlabel("step")
    for axes in (above, below):
        axes.grid(visible=True, alpha=0.3)
    figure.suptitle(title, fontsize="small")
    figure.savefig(path, format=kind, dpi=_DPI)


def _smoothed(values: list[float]) -> list[float]:
    length = max(1, round(_SMOOTHED_FRACTION * len(values)))
    return [
        sum(values[max(0, index - length + 1) : index + 1]) / min(index + 1, length) for index in range(len(values))
    ]
