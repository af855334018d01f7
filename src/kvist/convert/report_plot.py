"""The figures of a report."""

from __future__ import annotations

from pathlib import Path

from kvist.bench.plot import Line, write_lines
from kvist.convert.report_rows import ConversionReport, kv_heads, printable
from kvist.convert.uptrain_curve import draw_curve

_SIZE_INCHES = (7.0, 2.6)
_DPI = 150


def draw_losses(path: Path, kind: str, report: ConversionReport) -> None:
    """A bar for each that predicts the text, the shortest being the best.

    Args:
        path: of the file, whatever its ending.
        kind: as `evaluate.plot.check_plot` gives it.
        report: what is drawn.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    axes = figure.add_subplot()
    places = range(len(report.predictions))  # names are no places: two texts may have one
    colors = ["tab:blue", "tab:orange"] + ["tab:gray"] * (len(places) - 2)
    drawn = axes.barh(places, [prediction.loss for prediction in report.predictions], color=colors)
    axes.set_yticks(places, [_plain(name) for name in report.names])
    axes.bar_label(drawn, fmt="{:.2f}", padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel(f"nats per token of {_plain(report.text)}; less is better")
    figure.savefig(path, format=kind, dpi=_DPI)


def draw_speeds(path: Path, kind: str, report: ConversionReport) -> None:
    """Tokens per second of both models over the context; the arguments are those of `draw_losses`."""
    rows = sorted(report.speeds, key=lambda row: row.context)
    x = [row.context for row in rows]
    source, converted, *_ = map(_plain, report.names)
    lines = {
        f"{source}, {kv_heads(report.source_kv_heads)}": Line(x, [row.source_tokens_per_s for row in rows]),
        f"{converted}, {kv_heads(report.converted_kv_heads)}": Line(x, [row.converted_tokens_per_s for row in rows]),
    }
    title = f"decode, {report.config.weights_format} weights, {report.config.kv_format} cache"
    write_lines(path, kind, lines, x_label="tokens in the cache", y_label="tokens per second", title=title)


def draw_training(path: Path, kind: str, report: ConversionReport) -> None:
    """The learning curve of the last training, where there is one; the arguments are those of `draw_losses`."""
    training = report.record.training
    references = {} if training is None else {_plain(name): loss for name, loss in training.references.items()}
    assert report.curve is not None
    draw_curve(path, kind=kind, curve=report.curve, references=references, title=_plain(report.converted))


def _plain(text: str) -> str:
    """A name for matplotlib, which takes what lies between dollars for mathematics."""
    return printable(text).replace("$", r"\$")
