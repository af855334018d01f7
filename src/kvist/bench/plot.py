"""Figures as pictures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_SIZE_INCHES = (7.0, 4.0)
_DPI = 150


def write_bars(path: Path, kind: str, bars: Mapping[str, float], unit: str, title: str) -> None:
    """Draw a bar for each name, the longest being the best.

    Args:
        path: of the file, whatever its ending.
        kind: as `evaluate.plot.check_plot` gives it.
        bars: their lengths.
        unit: of the lengths.
        title: above the picture.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    axes = figure.add_subplot()
    drawn = axes.barh(list(bars), list(bars.values()), color="tab:blue")
    axes.bar_label(drawn, fmt="{:,.1f}", padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel(unit)
    figure.suptitle(title, fontsize="small")
    figure.savefig(path, format=kind, dpi=_DPI)
