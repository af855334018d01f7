"""`kvist bench prefill`: how fast a prompt is computed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvist.cli import bench_options, options
from kvist.cli.bench_model import Asked, bench_model
from kvist.cli.bench_report import ModelReport, new_table, produce

if TYPE_CHECKING:
    from rich.table import Table

    from kvist.bench.rates import PrefillRow


def prefill(
    model: options.ModelOption = options.DEFAULT_MODEL,
    contexts: Annotated[
        str, typer.Option(help="Tokens of a prompt, several numbers with commas.", metavar="N,N")
    ] = "1024,7000",
    kv_format: bench_options.FormatsOption = None,
    weights_format: options.WeightsFormatOption = None,
    text: bench_options.TextOption = None,
    repetitions: bench_options.RepetitionsOption = 5,
    json: bench_options.JsonOption = None,
    plot: bench_options.PlotOption = None,
    threads: options.ThreadsOption = None,
) -> None:
    """How fast a prompt is computed, by format.

    That is its tokens over the time to the first new one, from an empty cache. The prompt is a real text. Formats are
    timed in turn; a repetition counts only where the read bandwidth before and after it is the same within 10 %.
    """
    asked = Asked(model, weights_format, bench_options.formats(kv_format), text, repetitions, threads)
    lengths = bench_options.numbers("contexts", contexts)
    produce(lambda: _report(asked, lengths), json=json, plot=plot, text=text)


@dataclass(frozen=True)
class PrefillReport(ModelReport):
    """Tokens per second over lengths of prompts."""

    rows: tuple[PrefillRow, ...]

    @property
    def work(self) -> str:
        return "prefill"

    @property
    def is_steady(self) -> bool:
        return all(row.is_steady for row in self.rows)

    def figures(self) -> dict[str, Any]:
        return {"rows": [asdict(row) for row in self.rows]}

    def tables(self) -> Iterable[Table]:
        table = new_table("context", "kv_format", "tokens/s", "seconds", "bandwidth", "spread", names=2)
        table.columns[0].justify = "right"
        for row in self.rows:
            table.add_row(
                f"{row.context:,}",
                row.kv_format,
                f"{row.tokens_per_s:,.0f}",
                f"{row.seconds:.3f}",
                f"{row.bandwidth_gb_per_s:.1f}",
                f"{row.spread_fraction:.0%}" + ("" if row.is_steady else " ?"),
            )
        return [table]

    def draw(self, path: Path, kind: str) -> None:
        from kvist.bench.plot import Line, write_lines

        lines: dict[str, Line] = {}
        for name in dict.fromkeys(row.kv_format for row in self.rows):
            points = sorted((row.context, row.tokens_per_s) for row in self.rows if row.kv_format == name)
            x, y = zip(*points, strict=True)
            lines[name] = Line(x, y)
        write_lines(path, kind, lines, x_label="tokens of the prompt", y_label="tokens per second", title=self.title)


def _report(asked: Asked, contexts: tuple[int, ...]) -> PrefillReport:
    from kvist.bench.rates import prefill_rows

    longest = max(contexts)
    with bench_model(asked, [longest], 0, kept=False) as model:
        memory = model.filled(lambda runs: runs.prefill(longest))
        rows = prefill_rows(model.runs, contexts, model.repetitions, model.bandwidth, model.progress)
    return PrefillReport(model.machine, model.subject, memory, tuple(rows))
