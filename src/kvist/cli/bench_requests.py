"""`kvist bench batch --requests`: whole requests that come all at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvist.cli.bench_model import Asked, bench_model
from kvist.cli.bench_report import ModelReport, new_table

if TYPE_CHECKING:
    from rich.table import Table

    from kvist.bench.rates import RequestsRow

NEW_TOKENS = 64


@dataclass(frozen=True)
class RequestsReport(ModelReport):
    """Seconds until all requests have their answers.

    Attributes:
        lengths: tokens of each prompt.
        rows: the figures.
    """

    lengths: tuple[int, ...]
    rows: tuple[RequestsRow, ...]

    @property
    def work(self) -> str:
        return "requests"

    @property
    def title(self) -> str:
        return (
            f"{super().title}, {len(self.lengths)} at once of {min(self.lengths):,} to {max(self.lengths):,} tokens "
            f"({sum(self.lengths):,} in all), {NEW_TOKENS} that follow each"
        )

    @property
    def is_steady(self) -> bool:
        return all(row.is_steady for row in self.rows)

    def figures(self) -> dict[str, Any]:
        return {"prompt_tokens_each": list(self.lengths), "rows": [asdict(row) for row in self.rows]}

    def tables(self) -> Iterable[Table]:
        table = new_table("kv_format", "seconds", "tokens/s", "bandwidth", "spread")
        for row in self.rows:
            table.add_row(
                row.kv_format,
                f"{row.seconds:.2f}",
                f"{row.tokens_per_s:,.0f}",
                f"{row.bandwidth_gb_per_s:.1f}",
                f"{row.spread_fraction:.0%}" + ("" if row.is_steady else " ?"),
            )
        return [table]

    def draw(self, path: Path, kind: str) -> None:
        from kvist.bench.plot import write_bars

        bars = {row.kv_format: row.tokens_per_s for row in self.rows}
        write_bars(path, kind, bars, "tokens per second, prompts and answers", self.title)


def requests_report(asked: Asked, num_requests: int) -> RequestsReport:
    """Load the model and measure."""
    from kvist.bench.rates import request_lengths, requests_rows

    lengths = request_lengths(num_requests)
    with bench_model(asked, lengths, NEW_TOKENS - 1, kept=False) as model:
        memory = model.filled(lambda runs: runs.answer(lengths))
        rows = requests_rows(model.runs, lengths, model.repetitions, model.bandwidth, model.progress)
    return RequestsReport(model.machine, model.subject, memory, tuple(lengths), tuple(rows))
