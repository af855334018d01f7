"""`kvist bench decode` and `kvist bench batch`: how fast tokens follow one another."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvist.checks import check_integer
from kvist.cli import bench_options, options
from kvist.cli.bench_model import Asked, bench_model
from kvist.cli.bench_report import BenchReport, ModelReport, new_table, produce
from kvist.config import EngineConfig

if TYPE_CHECKING:
    from rich.table import Table

    from kvist.bench.rates import DecodeRow

DECODE_CONTEXTS = "128,1024,4096,7000"
TOKENS = 32
_MOST_REQUESTS = 10_000

TokensOption = Annotated[int, typer.Option(help="Tokens of each sequence that are timed in a run.", metavar="N")]


def decode(
    model: options.ModelOption = options.DEFAULT_MODEL,
    contexts: Annotated[
        str, typer.Option(help="Tokens in the cache, several numbers with commas.", metavar="N,N")
    ] = DECODE_CONTEXTS,
    kv_format: bench_options.FormatsOption = None,
    weights_format: options.WeightsFormatOption = None,
    tokens: TokensOption = TOKENS,
    profile: Annotated[
        bool, typer.Option("--profile", help="Where a step's time goes, in place of tokens per second.")
    ] = False,
    text: bench_options.TextOption = None,
    repetitions: bench_options.RepetitionsOption = 5,
    json: bench_options.JsonOption = None,
    plot: bench_options.PlotOption = None,
    threads: options.ThreadsOption = None,
) -> None:
    """How fast one sequence is decoded, by format.

    It is after contexts of several lengths. The context is a real text. Beside the tokens per second stand the bytes
    that a step must read, of weights and of keys and values, and the limit: what the read bandwidth of the moment
    allows. Formats are timed in turn; a repetition counts only where the read bandwidth before and after it is the same
    within 10 %.
    """
    asked = Asked(model, weights_format, bench_options.formats(kv_format), text, repetitions, threads)
    lengths = bench_options.numbers("contexts", contexts)
    check_integer("tokens", tokens, 1)

    def measure() -> BenchReport:
        if profile:
            from kvist.cli.bench_profile import profile_report

            return profile_report(asked, lengths, tokens)
        return _report("decode", asked, lengths, (1,), tokens)

    produce(measure, json=json, plot=plot, text=text)


def batch(
    model: options.ModelOption = options.DEFAULT_MODEL,
    batch: Annotated[
        str, typer.Option(help="Sequences that decode together, several numbers with commas.", metavar="N,N")
    ] = "1,8,32",
    context: Annotated[int, typer.Option(help="Tokens of each in the cache, none of them shared.", metavar="N")] = 1000,
    kv_format: bench_options.FormatsOption = None,
    weights_format: options.WeightsFormatOption = None,
    tokens: TokensOption = TOKENS,
    requests: Annotated[
        int | None,
        typer.Option(
            help="In place of it: N requests at once, of 200 to 1,500 tokens each, and 64 that follow.",
            metavar="N",
            min=1,
            max=_MOST_REQUESTS,
        ),
    ] = None,
    text: bench_options.TextOption = None,
    repetitions: bench_options.RepetitionsOption = 5,
    json: bench_options.JsonOption = None,
    plot: bench_options.PlotOption = None,
    threads: options.ThreadsOption = None,
) -> None:
    """How fast several sequences are decoded together.

    Weights are read once a step for all sequences, keys and values for each: so many together give more tokens per
    second than one. --requests 32 measures whole requests, from their prompts to their last tokens.
    """
    asked = Asked(model, weights_format, bench_options.formats(kv_format), text, repetitions, threads)
    batches = bench_options.numbers("batch", batch, EngineConfig.max_step_tokens)
    check_integer("context", context, 1)
    check_integer("tokens", tokens, 1)

    def measure() -> BenchReport:
        if requests is not None:
            from kvist.cli.bench_requests import requests_report

            return requests_report(asked, requests)
        return _report("batch", asked, (context,), batches, tokens)

    produce(measure, json=json, plot=plot, text=text)


@dataclass(frozen=True)
class DecodeReport(ModelReport):
    """Tokens per second over contexts, or over batches.

    Attributes:
        verb: `decode` or `batch`.
        tokens: that were timed in a run.
        rows: the figures.
    """

    verb: str
    tokens: int
    rows: tuple[DecodeRow, ...]

    @property
    def work(self) -> str:
        return self.verb

    @property
    def title(self) -> str:
        what = "one sequence" if self.verb == "decode" else f"sequences of {self.rows[0].context:,} tokens together"
        return f"{super().title}, {what}, {self.tokens} tokens a run"

    @property
    def is_steady(self) -> bool:
        return all(row.is_steady for row in self.rows)

    def figures(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "rows": [asdict(row) for row in self.rows]}

    def tables(self) -> Iterable[Table]:
        of_batch = self.verb == "batch"
        columns = ["batch" if of_batch else "context", "kv_format", "tokens/s", *(["to one"] if of_batch else [])]
        columns += ["limit", "fraction", "GB/s", "bandwidth", "weights MB", "cache MB", "spread"]
        table = new_table(*columns, names=2)
        table.columns[0].justify = "right"
        for row in self.rows:
            cells = [f"{row.batch if of_batch else row.context:,}", row.kv_format, f"{row.tokens_per_s:,.1f}"]
            if of_batch:
                cells.append("" if row.ratio_to_one is None else f"{row.ratio_to_one:.2f}")
            cells += [
                f"{row.limit_tokens_per_s:,.1f}",
                f"{row.roofline_fraction:.0%}" + ("" if row.is_steady else " ?"),
                f"{row.gb_per_s:.1f}",
                f"{row.bandwidth_gb_per_s:.1f}",
                f"{row.weights_bytes / 1e6:,.1f}",
                f"{row.cache_bytes / 1e6:,.1f}",
                f"{row.spread_fraction:.0%}",
            ]
            table.add_row(*cells)
        return [table]

    def draw(self, path: Path, kind: str) -> None:
        from kvist.bench.plot import Line, write_lines

        lines: dict[str, Line] = {}
        for name in dict.fromkeys(row.kv_format for row in self.rows):
            points = [
                (row.batch if self.verb == "batch" else row.context, row.tokens_per_s, row.limit_tokens_per_s)
                for row in self.rows
                if row.kv_format == name
            ]
            x, y, limit = zip(*sorted(points), strict=True)
            lines[name] = Line(x, y, limit)
        x_label = "sequences" if self.verb == "batch" else "tokens in the cache"
        write_lines(
            path,
            kind,
            lines,
            x_label=x_label,
            y_label="tokens per second",
            title=self.title,
            limit="limit: bandwidth over bytes",
        )


def _report(verb: str, asked: Asked, contexts: tuple[int, ...], batches: tuple[int, ...], tokens: int) -> DecodeReport:
    from kvist.bench.rates import decode_rows
    from kvist.bench.step_bytes import weights_read

    context, most = max(contexts), max(batches)
    with bench_model(asked, [context] * most, tokens, kept=True) as model:
        memory = model.filled(lambda runs: runs.decode(context, most))
        rows = decode_rows(
            model.runs,
            contexts,
            batches,
            weights_read(model.loaded),
            model.repetitions,
            model.bandwidth,
            model.progress,
        )
    return DecodeReport(model.machine, model.subject, memory, verb, tokens, tuple(rows))
