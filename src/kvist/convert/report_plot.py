"""The figures of a report."""

from __future__ import annotations

from pathlib import Path

from kvist.bench.plot import Line, write_lines
from kvist.convert.report import ConversionReport

_SIZE_INCHES = (7.0, 2.6)
_DPI = 150


def draw_losses(path: Path, report: ConversionReport) -> None:
    """A bar for each that predicts the text, the shortest being the best."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    axes = figure.add_subplot()
    names = [prediction.name for prediction in report.predictions]
    colors = ["tab:blue", "tab:orange"] + ["tab:gray"] * (len(names) - 2)
    drawn = axes.barh(names, [prediction.loss for prediction in report.predictions], color=colors)
    axes.bar_label(drawn, fmt="{:.2f}", padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel(f"nats per token of {report.text}; less is better")
    figure.savefig(path, format="png", dpi=_DPI)


def draw_speeds(path: Path, report: ConversionReport) -> None:
    """Tokens per second of both models over the context."""
    rows = sorted(report.speeds, key=lambda row: row.context)
    x = [row.context for row in rows]
    lines = {
        f"{report.source}, {report.source_kv_heads} KV heads": Line(x, [row.source_tokens_per_s for row in rows]),
        f"{report.converted}, {report.converted_kv_heads} KV heads": Line(
            x, [row.converted_tokens_per_s for row in rows]
        ),
    }
    title = f"decode, {report.config.weights_format} weights, {report.config.kv_format} cache"
    write_lines(path, "png", lines, x_label="tokens in the cache", y_label="tokens per second", title=title)
