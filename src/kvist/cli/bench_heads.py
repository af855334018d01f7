"""`kvist bench heads`: what sharing keys and values saves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvist.cli import bench_options, options
from kvist.cli.bench_report import BenchReport, new_table, produce
from kvist.cli.progress import progress_bar
from kvist.config import check_threads

if TYPE_CHECKING:
    from rich.table import Table

    from kvist.bench.heads import HeadsRow, HeadsShape

_SHOWN_LENGTHS = 5
_MIB = 2**20
# As in `kvist.bench.heads`, which needs more than a command line that is only parsed should wait for.
_UNCACHED_LENGTHS = 16


def heads(
    embed_dim: Annotated[int, typer.Option(help="Dims of a hidden state.", metavar="N")] = 1024,
    num_heads: Annotated[int, typer.Option(help="Query heads.", metavar="N")] = 16,
    kv_heads: Annotated[
        str, typer.Option(help="KV heads, several numbers with commas; the first is compared with.", metavar="N,N")
    ] = "16,8,4,2,1",
    layers: Annotated[int, typer.Option(help="Layers of the decoder.", metavar="N")] = 8,
    prompt: Annotated[int, typer.Option(help="Tokens that are there first.", metavar="N")] = 4,
    new_tokens: Annotated[int, typer.Option(help="Tokens that follow.", metavar="N")] = 1024,
    batch: Annotated[int, typer.Option(help="Rows at once.", metavar="N")] = 1,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help=f"Time a token without a cache too, at {_UNCACHED_LENGTHS} lengths.")
    ] = False,
    device: Annotated[str, typer.Option(help="Where to compute: cpu, cuda.", metavar="DEVICE")] = "cpu",
    json: bench_options.JsonOption = None,
    plot: bench_options.PlotOption = None,
    threads: options.ThreadsOption = None,
) -> None:
    """What sharing keys and values saves.

    One small decoder with random weights has fewer and fewer KV heads. Each number of KV heads generates the same count
    of tokens over a cache that grows by concatenation, in turns of 32 tokens, so that what the machine does meanwhile
    meets all alike.
    """
    counts = bench_options.numbers("kv_heads", kv_heads)
    if threads is not None:
        check_threads("threads", threads)
    options.prepare_to_compute()
    from kvist.bench.heads import HeadsShape

    shape = HeadsShape(embed_dim, num_heads, counts, layers, prompt, new_tokens, batch)
    produce(lambda: _measure(shape, device, threads, no_cache=no_cache), json=json, plot=plot)


@dataclass(frozen=True)
class HeadsReport(BenchReport):
    """What `kvist bench heads` prints and writes.

    Attributes:
        shape: what was generated.
        device: on what.
        rows: one for each number of KV heads; the first is what others are compared with.
        bandwidths: read from memory, bytes per second, before, meanwhile and after; none off the CPU.
    """

    shape: HeadsShape
    device: str
    rows: tuple[HeadsRow, ...]
    bandwidths: tuple[float, ...]

    @property
    def work(self) -> str:
        return "heads"

    @property
    def is_steady(self) -> bool:
        from kvist.bench.probed import MOST_DRIFT

        return not self.bandwidths or min(self.bandwidths) >= (1 - MOST_DRIFT) * max(self.bandwidths)

    @property
    def title(self) -> str:
        shape = self.shape
        batch = f", batch {shape.batch}" if shape.batch > 1 else ""
        return (
            f"{shape.prompt:,} tokens and {shape.new_tokens:,} new ones{batch}; {shape.layers} layers of "
            f"{shape.embed_dim:,} dims, {shape.num_heads} query heads of {shape.head_dim}; fp32 on {self.device}"
        )

    @property
    def facts(self) -> str:
        lines = [self.machine.line]
        if self.bandwidths:
            low, high = (bound / 1e9 for bound in (min(self.bandwidths), max(self.bandwidths)))
            lines.append(f"read bandwidth meanwhile: {low:.1f} to {high:.1f} GB/s")
        if not self.is_steady:
            lines.append("? it moved by more than 10 %: compare rows at one length, timed in turn, rather than lengths")
        return "\n".join(lines)

    def tables(self) -> Iterable[Table]:
        yield self._speed_table()
        yield _over_length("", [(row, row.lengths, row.ms_per_token) for row in self.rows])
        yield self._cache_table()
        if (first := self.rows[0].uncached) is not None:
            uncached = [(row, row.uncached.lengths, row.uncached.ms_per_token) for row in self.rows if row.uncached]
            yield _over_length(" without a cache", uncached)
            yield self._uncached_table(f"{len(first.lengths):,} of {first.generated_lengths:,} lengths")

    def figures(self) -> dict[str, Any]:
        from kvist.bench.heads import pays_from

        baseline = self.rows[0]
        return {
            "shape": asdict(self.shape),
            "device": self.device,
            "rows": [
                {
                    **asdict(row),
                    "total_seconds": row.total_seconds,
                    "tokens_per_s": row.tokens_per_s,
                    "speed_up": row.tokens_per_s / baseline.tokens_per_s,
                    "pays_from": pays_from(row, baseline),
                    "growth": self._growths(row)[0],
                    "uncached_growth": self._growths(row)[1],
                    "uncached_total_seconds": None if row.uncached is None else row.uncached.total_seconds,
                }
                for row in self.rows
            ],
            "bandwidth_bytes_per_s": self.bandwidths,
            "is_steady": self.is_steady,
        }

    def draw(self, path: Path, kind: str) -> None:
        from kvist.bench.heads_plot import write_heads

        write_heads(path, kind, self.rows, self.title)

    def _speed_table(self) -> Table:
        from kvist.bench.heads import pays_from

        baseline = self.rows[0]
        table = new_table(
            "KV heads", "", "weights MiB", "prompt ms", "tokens/s", f"to {baseline.num_kv_heads}", "pays from", names=2
        )
        for row in self.rows:
            first = pays_from(row, baseline)
            table.add_row(
                *_names(row),
                f"{row.weights_bytes / _MIB:,.0f}",
                f"{row.prefill_ms:,.1f}",
                f"{row.tokens_per_s:,.1f}",
                f"{row.tokens_per_s / baseline.tokens_per_s:.2f}x",
                "" if row is baseline else "never" if first is None else f"{first:,} tokens",
            )
        return table

    def _cache_table(self) -> Table:
        tokens, length = self.rows[0].cache_tokens, self.rows[0].lengths[-1]
        on_cuda = self.rows[0].cuda_bytes is not None
        table = new_table(
            "KV heads", "", f"scalars a layer at {tokens:,}: counted", "measured", f"MiB at {length:,}: cache",
            "process", *(["CUDA"] if on_cuda else []), names=2,
        )  # fmt: skip
        for row in self.rows:
            grown = [row.process_bytes[-1], *([row.cuda_bytes[-1]] if row.cuda_bytes is not None else [])]
            table.add_row(
                *_names(row),
                f"{row.counted_scalars:,}",
                f"{row.measured_scalars:,}",
                f"{row.cache_bytes[-1] / _MIB:,.2f}",
                *(f"{size / _MIB:+,.1f}" for size in grown),
            )
        return table

    def _uncached_table(self, timed: str) -> Table:
        table = new_table(
            "KV heads", "", "seconds with a cache", f"without, from {timed}", "ratio",
            "grows with the power", "without", names=2,
        )  # fmt: skip
        for row in self.rows:
            if row.uncached is None:
                continue
            cached, uncached = row.total_seconds[-1], row.uncached.total_seconds[-1]
            powers = ("" if power is None else f"{power:.2f}" for power in self._growths(row))
            table.add_row(*_names(row), f"{cached:,.2f}", f"{uncached:,.2f}", f"{uncached / cached:.1f}x", *powers)
        return table

    def _growths(self, row: HeadsRow) -> tuple[float | None, float | None]:
        """With which powers of the length the time grows, with a cache and without."""
        from kvist.bench.heads import growth

        uncached = row.uncached
        without = None if uncached is None else growth(uncached.lengths[1:], uncached.total_seconds[1:])
        return growth(row.lengths, row.total_seconds), without


def _names(row: HeadsRow) -> tuple[str, str]:
    return f"{row.num_kv_heads}", row.kind


def _over_length(how: str, rows: Sequence[tuple[HeadsRow, Sequence[int], Sequence[float]]]) -> Table:
    """Milliseconds per token at a few of the lengths, the first and the last among them."""
    last = len(rows[0][1]) - 1
    shown = sorted({last * step // (_SHOWN_LENGTHS - 1) for step in range(_SHOWN_LENGTHS)})
    first, *others = (f"{rows[0][1][index]:,}" for index in shown)
    table = new_table("KV heads", "", f"ms a token{how}, at {first}", *others, names=2)
    for row, _, ms_per_token in rows:
        table.add_row(*_names(row), *(f"{ms_per_token[index]:,.2f}" for index in shown))
    return table


def _measure(shape: HeadsShape, device: str, threads: int | None, *, no_cache: bool) -> HeadsReport:
    import torch

    from kvist.bench.heads_runs import measure_heads
    from kvist.bench.machine import MachineFacts
    from kvist.kernels import native

    if threads is not None:
        torch.set_num_threads(threads)
    with progress_bar() as progress:
        rows, bandwidths = measure_heads(
            shape,
            no_cache=no_cache,
            device=device,
            progress=progress,
            bandwidth=lambda: max(native.read_rates(passes=2)),
        )
    return HeadsReport(MachineFacts.gather(torch.get_num_threads()), shape, device, tuple(rows), bandwidths)
