"""Figures as pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_SIZE_INCHES = (7.0, 4.0)
_DPI = 150
# A segment of a bar that is narrower has no room for its number.
_LEAST_LABELLED = 0.05


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


@dataclass(frozen=True)
class Line:
    """Points to be joined.

    Attributes:
        x, y: of each point, x ascending.
        limit: what `y` could be at most, drawn dashed in the same colour; None where there is no such limit.
    """

    x: Sequence[float]
    y: Sequence[float]
    limit: Sequence[float] | None = None


def write_lines(
    path: Path, kind: str, lines: Mapping[str, Line], *, x_label: str, y_label: str, title: str, limit: str = ""
) -> None:
    """Draw a line for each name over a common axis, its limit dashed.

    Args:
        path, kind, title: as in `write_bars`.
        lines: by name.
        x_label, y_label: of the axes.
        limit: what dashed lines are.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    axes = figure.add_subplot()
    for number, (name, line) in enumerate(lines.items()):
        axes.plot(line.x, line.y, "o-", color=f"C{number}", label=name)
        if line.limit is not None:
            axes.plot(line.x, line.limit, "--", color=f"C{number}", linewidth=1)
    if any(line.limit is not None for line in lines.values()):
        axes.plot([], [], "--", color="black", linewidth=1, label=limit)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="small")
    figure.suptitle(title, fontsize="small")
    figure.savefig(path, format=kind, dpi=_DPI)


def write_stacked_bars(
    path: Path, kind: str, bars: Mapping[str, Mapping[str, float]], *, unit: str, title: str
) -> None:
    """Draw a bar for each name, made of segments that have the same colour in every bar.

    Args:
        path, kind, title: as in `write_bars`.
        bars: for each name, its segments' lengths by their names.
        unit: of the lengths.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    # Strong colours first, then their pale twins.
    colors = [colormaps["tab20"](number) for number in (*range(0, 20, 2), *range(1, 20, 2))]
    segments = list(dict.fromkeys(segment for bar in bars.values() for segment in bar))
    longest = max(sum(bar.values()) for bar in bars.values())
    figure = Figure(figsize=(_SIZE_INCHES[0], 1.8 + 0.5 * len(bars) + 0.12 * len(segments)), layout="constrained")
    axes = figure.add_subplot()
    ends = [0.0] * len(bars)
    for number, segment in enumerate(segments):
        lengths = [bar.get(segment, 0.0) for bar in bars.values()]
        drawn = axes.barh(list(bars), lengths, left=ends, color=colors[number % len(colors)], label=segment)
        labels = [f"{length:.2f}" if length > _LEAST_LABELLED * longest else "" for length in lengths]
        axes.bar_label(drawn, labels, label_type="center", fontsize="x-small", color="white")
        ends = [end + length for end, length in zip(ends, lengths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="x-small")
    figure.suptitle(title, fontsize="small")
    figure.savefig(path, format=kind, dpi=_DPI)
