"""The effect of sharing keys and values as one picture of four panels, in the shape of a slide."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvist.bench.heads import HeadsRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE_INCHES = (13.33, 7.5)
_DPI = 150
_COLORS = ("viridis", 0.0, 0.85)  # from dark, many heads, to light; beyond that yellow is lost on white
_MOST_NAMES, _MOST_LONG_NAMES = 6, 3  # in a line
_MIB = 2**20


def write_heads(path: Path, kind: str, rows: Sequence[HeadsRow], title: str) -> None:
    """Draw time per token, total time, tokens per second and memory.

    Args:
        path: of the file, whatever its ending.
        kind: as `evaluate.plot.check_plot` gives it.
        rows: one for each number of KV heads; the first is what others are compared with.
        title: above the picture.
    """
    import matplotlib as mpl
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    name, low, high = _COLORS
    steps = max(1, len(rows) - 1)
    colors = [colormaps[name](low + (high - low) * index / steps) for index in range(len(rows))]
    with mpl.rc_context({"font.size": 13, "axes.titlesize": 15, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
        per_token, total, rates, memory = figure.subplots(2, 2).flat
        _draw_per_token(per_token, rows, colors)
        _draw_total(total, rows, colors)
        _draw_rates(rates, rows, colors)
        _draw_memory(memory, rows, colors)
        handles, labels = per_token.get_legend_handles_labels()
        figure.legend(
            handles,
            labels,
            loc="outside lower center",
            ncols=min(len(labels), _MOST_LONG_NAMES if any(row.uncached for row in rows) else _MOST_NAMES),
            frameon=False,
            handlelength=1.2,
            columnspacing=1.2,
        )
        figure.suptitle(title, fontsize=13, color="dimgray")
        figure.savefig(path, format=kind, dpi=_DPI)


def _draw_per_token(axes: Axes, rows: Sequence[HeadsRow], colors: Sequence[Any]) -> None:
    for row, color in zip(rows, colors, strict=True):
        name = f"{row.num_kv_heads} KV head{'s' * (row.num_kv_heads != 1)} ({row.kind})"
        axes.plot(row.lengths, row.ms_per_token, color=color, linewidth=2, label=name)
        if row.uncached is not None:
            axes.plot(row.uncached.lengths, row.uncached.ms_per_token, ".--", color=color, linewidth=1.5)
    if any(row.uncached for row in rows):
        _set_log_scale(axes)
        axes.plot([], [], ".--", color="gray", label="without a cache, timed at the dots")
    else:
        axes.set_ylim(bottom=0)
    axes.set_title("Time per token")
    _label(axes, "tokens so far", "ms")


def _draw_total(axes: Axes, rows: Sequence[HeadsRow], colors: Sequence[Any]) -> None:
    for row, color in zip(rows, colors, strict=True):
        axes.plot(row.lengths, row.total_seconds, color=color, linewidth=2)
        if row.uncached is not None:
            axes.plot(row.uncached.lengths[1:], row.uncached.total_seconds[1:], "--", color=color, linewidth=1.5)
    # What slopes of 1 and 2 look like: below where the fastest end, and above where the slowest do.
    _draw_slope(axes, rows[0].lengths, 0.5 * min(row.total_seconds[-1] for row in rows), 1, "linear")
    uncached = [row.uncached for row in rows if row.uncached is not None]
    if uncached:
        _draw_slope(axes, uncached[0].lengths, 2 * max(one.total_seconds[-1] for one in uncached), 2, "quadratic")
    axes.margins(y=0.1)  # room for the names
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    _set_log_scale(axes)
    axes.set_title("Total time")
    _label(axes, "tokens so far", "seconds")


def _set_log_scale(axes: Axes) -> None:
    """A logarithmic scale upwards, with plain numbers at 1, 2 and 5 of each power."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def _draw_slope(axes: Axes, lengths: Sequence[int], seconds: float, power: int, name: str) -> None:
    """A straight line on logarithmic scales over the last two doublings of the length, which ends at `seconds`."""
    axes.plot((lengths[-1] / 4, lengths[-1]), (seconds / 4**power, seconds), ":", color="gray", linewidth=2)
    below = power == 1
    axes.annotate(
        name,
        (lengths[-1], seconds),
        (0, -12 if below else 4),
        textcoords="offset points",
        ha="right",
        va="top" if below else "bottom",
    )


def _draw_rates(axes: Axes, rows: Sequence[HeadsRow], colors: Sequence[Any]) -> None:
    names = [f"{row.num_kv_heads}" for row in rows]
    rates = [row.tokens_per_s for row in rows]
    bars = axes.bar(names, rates, color=colors)
    axes.bar_label(bars, [f"{rate:,.1f}\n{rate / rates[0]:.2f} x" for rate in rates], padding=3)
    axes.margins(y=0.25)
    axes.set_title("Tokens per second")
    axes.set_xlabel("KV heads")


def _draw_memory(axes: Axes, rows: Sequence[HeadsRow], colors: Sequence[Any]) -> None:
    for row, color in zip(rows, colors, strict=True):
        measured = row.process_bytes if row.cuda_bytes is None else row.cuda_bytes
        axes.plot(row.lengths, [size / _MIB for size in row.cache_bytes], color=color, linewidth=2)
        axes.plot(row.lengths, [size / _MIB for size in measured], ".", color=color, markersize=5)
    axes.plot([], [], color="gray", label="cache")
    of = "process" if rows[0].cuda_bytes is None else "CUDA"
    axes.plot([], [], ".", color="gray", label=f"growth of {of} memory")
    axes.legend(frameon=False, loc="upper left")
    axes.set_ylim(bottom=0)
    axes.set_title("Memory")
    _label(axes, "tokens so far", "MiB")


def _label(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(visible=True, alpha=0.3)
