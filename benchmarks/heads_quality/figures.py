"""What the runs came to, as a table and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """A conversion of the trained model.

    Attributes:
        method: of `kvist.convert`; `none` for the model itself.
        kv_heads: of the result.
        loss_before, loss_after: nats per token of the held-out text, before and after uptraining.
        seconds: that the uptraining took.
    """

    method: str
    kv_heads: int
    loss_before: float
    loss_after: float
    seconds: float


def table(rows: Sequence[Row], mha_loss: float) -> str:
    """In Markdown; the last column says what is lost against the model before it was converted."""
    lines = ["| method | KV heads | before | after | after, less MHA |", "|---|---:|---:|---:|---:|"]
    lines += [
        f"| {row.method} | {row.kv_heads} | {row.loss_before:.3f} | {row.loss_after:.3f} | "
        f"{row.loss_after - mha_loss:+.3f} |"
        for row in rows
    ]
    return "\n".join(lines)


def draw(path: Path, rows: Sequence[Row], mha_loss: float, title: str) -> None:
    """Loss over KV heads, a line for each method: before uptraining on the left, after it on the right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 4.0), layout="constrained")
    panels = figure.subplots(1, 2)
    methods = list(dict.fromkeys(row.method for row in rows if row.method != "none"))
    heads = sorted({row.kv_heads for row in rows})
    for axes, name in zip(panels, ("before", "after"), strict=True):
        for number, method in enumerate(methods):
            points = sorted((row.kv_heads, getattr(row, f"loss_{name}")) for row in rows if row.method == method)
            axes.plot(*zip(*points, strict=True), "o-", color=f"C{number}", label=method)
        axes.axhline(mha_loss, color="black", linestyle="--", linewidth=1, label="MHA, as trained")
        if name == "after":
            control = [row.loss_after for row in rows if row.method == "none"]
            for loss in control:
                axes.axhline(loss, color="tab:gray", linestyle=":", label="MHA, trained on as long")
        axes.set_xscale("log", base=2)
        axes.set_xticks(heads, [str(number) for number in heads])
        axes.set_xlabel("KV heads")
        axes.set_ylabel("nats per token, held out")
        axes.set_title(f"{name} uptraining", fontsize="small")
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize="small")
    figure.suptitle(title, fontsize="small")
    figure.savefig(path, dpi=150)
