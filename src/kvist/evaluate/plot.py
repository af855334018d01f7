"""Divergence over size, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvist.errors import OptionError, did_you_mean
from kvist.evaluate.evaluation import Evaluation

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE_INCHES = (7.0, 4.5)
_DPI = 150
_KINDS = ("png", "svg", "pdf")  # known everywhere; a new matplotlib may know more, but nobody needs more


def check_plot(path: Path) -> str:
    """Return the kind of picture that a file's ending asks for, before the minutes of work that a plot rests on.

    Raises:
        OptionError: the ending is not known, or matplotlib is not installed.
    """
    kind = path.suffix.removeprefix(".").lower()
    if kind not in _KINDS:
        raise OptionError(f"the plot {path} has no known ending: {did_you_mean(kind, _KINDS)}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise OptionError(
            "a plot needs matplotlib, which is not installed: pip install 'kvist[bench]', or pip install matplotlib"
        ) from None
    return kind


def write_plot(path: Path, kind: str, evaluation: Evaluation, title: str) -> None:
    """Draw mean and 99th percentile of each format's divergence over its bytes per token.

    Args:
        path: of the file, whatever its ending.
        kind: as `check_plot` gives it.
        evaluation: what is drawn.
        title: above the picture.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    axes = figure.add_subplot()
    rows = sorted(evaluation.rows, key=lambda row: row.kv_bytes_per_token)
    sizes = [row.kv_bytes_per_token for row in rows]
    means = [row.kl_mean for row in rows]
    axes.plot(sizes, [row.kl_p99 for row in rows], "x", color="tab:gray", label="99th percentile")
    axes.plot(sizes, means, "o", color="tab:blue", label="mean")
    for row, size, mean in zip(rows, sizes, means, strict=True):
        axes.annotate(row.kv_format, (size, mean), xytext=(6, 4), textcoords="offset points")
    _scale(axes, [row.kl_mean for row in rows] + [row.kl_p99 for row in rows])
    axes.set_xlim(left=0, right=max(sizes) * 1.2)  # names stand to the right of their points
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("bytes of keys and values per token")
    axes.set_ylabel("KL divergence, nats per token")
    axes.set_title(title, fontsize="medium")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path, format=kind, dpi=_DPI)


def _scale(axes: Axes, divergences: list[float]) -> None:
    """A logarithmic scale, since formats lie powers of ten apart; linear near zero where one does not diverge."""
    positive = [divergence for divergence in divergences if divergence > 0]
    if len(positive) == len(divergences):
        axes.set_yscale("log")
    elif positive:
        axes.set_yscale("symlog", linthresh=min(positive))
