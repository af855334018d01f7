"""`kvist bench attention`: attention over the cache by itself, format beside format."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvist.cli import bench_options, options
from kvist.cli.bench_report import BenchReport, new_table, produce
from kvist.cli.progress import progress_bar
from kvist.config import check_threads
from kvist.errors import OptionError
from kvist.kv_format import LayerFormats
from kvist.memory import binary_size

if TYPE_CHECKING:
    from rich.table import Table

    from kvist.bench.attention import AttentionShape
    from kvist.bench.probed import Timing

_SHARED = ", shared prefix"
_PEAKS = ("bfloat16", "int8")


def attention(
    heads: Annotated[int, typer.Option(help="Query heads.", metavar="N")] = 9,
    kv_heads: Annotated[int, typer.Option(help="KV heads.", metavar="N")] = 3,
    head_dim: Annotated[int, typer.Option(help="Dims of a head.", metavar="N")] = 64,
    context: Annotated[int, typer.Option(help="Tokens of each sequence.", metavar="N")] = 8192,
    batch: Annotated[int, typer.Option(help="Sequences.", metavar="N")] = 1,
    layers: Annotated[int, typer.Option(help="Layers, each with memory of its own.", metavar="N")] = 30,
    kv_format: bench_options.FormatsOption = None,
    prefill: Annotated[bool, typer.Option("--prefill", help="Measure prefill in place of decode.")] = False,
    shared_prefix: Annotated[
        bool, typer.Option("--shared-prefix", help="The same batch as forks of one sequence beside it.")
    ] = False,
    pytorch: Annotated[bool, typer.Option("--pytorch", help="PyTorch's own forms of decode beside it.")] = False,
    repetitions: bench_options.RepetitionsOption = 7,
    json: bench_options.JsonOption = None,
    plot: bench_options.PlotOption = None,
    threads: options.ThreadsOption = None,
) -> None:
    """How fast attention reads the cache, by format.

    Beside it stands the read bandwidth of the moment. Keys, values and queries are random, the same in every layer,
    which has memory of its own. Where all of it fits into the processor's caches, a line says so: take more --context,
    --layers or --batch. Formats are timed in turn; a repetition counts only where the read bandwidth before and after
    it is the same within 10 %.
    """
    formats = bench_options.formats(kv_format)
    if threads is not None:
        check_threads("threads", threads)
    if pytorch and prefill:
        raise OptionError("--pytorch has forms of decode only: leave out --prefill")

    if shared_prefix and (prefill or batch < 2):
        raise OptionError("--shared-prefix is for decoding several sequences: give --batch N, and leave out --prefill")

    options.prepare_to_compute()
    from kvist.bench.attention import AttentionShape

    shape = AttentionShape(heads, kv_heads, head_dim, context, batch, layers)
    produce(
        lambda: _measure(shape, formats, repetitions, threads, prefill=prefill, shares=shared_prefix, pytorch=pytorch),
        json=json,
        plot=plot,
    )


@dataclass(frozen=True)
class Row:
    """What one format, or form of PyTorch, came to.

    Attributes:
        name: of the format or form.
        tokens_per_s: of all sequences together.
        bytes_per_token: of keys and values, of all layers.
        read_bytes: of all keys and values that a run reads, a shared prefix once.
        gb_per_s: of keys and values that decode had to read, a shared prefix once; None in prefill.
        roofline_fraction: of the read bandwidth around it; None in prefill.
        gflop_per_s: of the causal products; None in decode.
        bandwidth_gb_per_s: around it.
        spread_fraction: of the repetitions that count.
        repetitions, discarded: that counted, and that did not since the bandwidth moved.
        is_steady: whether enough counted.
    """

    name: str
    tokens_per_s: float
    bytes_per_token: int
    read_bytes: int
    gb_per_s: float | None
    roofline_fraction: float | None
    gflop_per_s: float | None
    bandwidth_gb_per_s: float
    spread_fraction: float
    repetitions: int
    discarded: int
    is_steady: bool


@dataclass(frozen=True)
class AttentionReport(BenchReport):
    """Attention in several formats.

    Attributes:
        shape: what was computed.
        rows: the figures.
        peak_gflop_per_s: that PyTorch's products reached, by dtype; None in decode.
    """

    shape: AttentionShape
    rows: tuple[Row, ...]
    peak_gflop_per_s: dict[str, float] | None

    @property
    def work(self) -> str:
        return "decode" if self.peak_gflop_per_s is None else "prefill"

    @property
    def title(self) -> str:
        shape = self.shape
        return (
            f"{self.work}, {shape.num_heads} query heads over {shape.num_kv_heads} KV heads of {shape.head_dim} dims, "
            f"{shape.context:,} tokens, batch {shape.batch}, {shape.layers} layers"
        )

    @property
    def is_steady(self) -> bool:
        return all(row.is_steady for row in self.rows)

    @property
    def facts(self) -> str:
        lines = [super().facts]
        if self.peak_gflop_per_s is not None:
            peaks = ", ".join(f"{value:,.0f} in {name}" for name, value in self.peak_gflop_per_s.items())
            lines.append(f"the fastest products that PyTorch has, Gflop/s: {peaks}")
        cache_bytes = self.machine.last_level_cache_bytes or 0
        if fitting := [
            row.name for row in self.rows if self.peak_gflop_per_s is None and row.read_bytes <= cache_bytes
        ]:
            lines.append(
                f"no more than the last-level caches, {binary_size(cache_bytes)}, so perhaps not read from memory: "
                + ", ".join(fitting)
            )
        return "\n".join(lines)

    def figures(self) -> dict[str, Any]:
        return {
            "shape": asdict(self.shape),
            "rows": [asdict(row) for row in self.rows],
            "peak_gflop_per_s": self.peak_gflop_per_s,
        }

    def tables(self) -> Iterable[Table]:
        of_work = ("Gflop/s",) if self.peak_gflop_per_s is not None else ("GB/s", "bandwidth", "fraction")
        table = new_table("kv_format", "tokens/s", "bytes/token", *of_work, "spread")
        for row in self.rows:
            cells = [row.name, f"{row.tokens_per_s:,.1f}", f"{row.bytes_per_token:,}"]
            if row.gflop_per_s is not None:
                cells.append(f"{row.gflop_per_s:,.0f}")
            else:
                cells += [
                    f"{row.gb_per_s or 0:.1f}",
                    f"{row.bandwidth_gb_per_s:.1f}",
                    f"{row.roofline_fraction or 0:.0%}",
                ]
            table.add_row(*cells, f"{row.spread_fraction:.0%}" + ("" if row.is_steady else " ?"))
        return [table]

    def draw(self, path: Path, kind: str) -> None:
        from kvist.bench.plot import write_bars

        write_bars(path, kind, {row.name: row.tokens_per_s for row in self.rows}, "tokens per second", self.title)


def _measure(
    shape: AttentionShape,
    formats: tuple[LayerFormats, ...],
    repetitions: int,
    threads: int | None,
    *,
    prefill: bool,
    shares: bool,
    pytorch: bool,
) -> AttentionReport:
    import torch

    from kvist.bench.attention import FilledCache, torch_forms
    from kvist.bench.machine import MachineFacts
    from kvist.bench.peak import SIZES, PeakProducts
    from kvist.bench.probed import time_in_turn
    from kvist.kernels import native

    if threads is not None:
        torch.set_num_threads(threads)
    tokens_read = shape.context * shape.batch
    with progress_bar() as progress:
        tasks: dict[str, Callable[[], object]] = {}
        bytes_per_token: dict[str, int] = {}
        caches = [(kv_format, forks) for kv_format in formats for forks in (False, *([True] if shares else []))]
        for done, (kv_format, forks) in enumerate(caches):
            progress("filling caches", done, len(caches))
            cache = FilledCache(shape, kv_format, shares=forks)
            name = f"{kv_format}{_SHARED}" if forks else str(kv_format)
            tasks[name] = cache.prefill if prefill else cache.decode
            bytes_per_token[name] = cache.bytes_per_token
        if pytorch:
            for name, form in torch_forms(shape):
                tasks[f"PyTorch, {name}"] = form
                bytes_per_token[f"PyTorch, {name}"] = 4 * shape.num_kv_heads * shape.head_dim * shape.layers
        peaks = {name: PeakProducts(getattr(torch, name), SIZES) for name in (_PEAKS if prefill else ())}
        timings = time_in_turn(
            tasks | {f"peak of {name}": peak.measure for name, peak in peaks.items()},
            repetitions,
            lambda: max(native.read_rates(passes=2)),
            done=lambda turn, turns: progress("measuring", turn, turns),
        )
    tokens, flop = (tokens_read, shape.prefill_flop) if prefill else (shape.batch, None)
    # What is shared need be read once.
    rows = tuple(
        _row(
            name,
            timings[name],
            tokens,
            bytes_per_token[name],
            shape.context if name.endswith(_SHARED) else tokens_read,
            flop,
        )
        for name in tasks
    )
    reached = {name: peak.flop_per_s / 1e9 for name, peak in peaks.items()} if prefill else None
    return AttentionReport(MachineFacts.gather(torch.get_num_threads()), shape, rows, reached)


def _row(name: str, timing: Timing, tokens: int, bytes_per_token: int, tokens_read: int, flop: int | None) -> Row:
    read_bytes = bytes_per_token * tokens_read
    read_per_s = read_bytes / timing.seconds
    return Row(
        name=name,
        tokens_per_s=tokens / timing.seconds,
        bytes_per_token=bytes_per_token,
        read_bytes=read_bytes,
        gb_per_s=None if flop is not None else read_per_s / 1e9,
        roofline_fraction=None if flop is not None else read_per_s / timing.bytes_per_s,
        gflop_per_s=None if flop is None else flop / timing.seconds / 1e9,
        **timing.fields(),
    )
