"""`kvist bench attention`: attention over the cache by itself, format beside format."""

from __future__ import annotations

import json as json_module
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvist.cli import options
from kvist.cli.output import table_console
from kvist.cli.output_file import output_file
from kvist.cli.progress import progress_bar
from kvist.config import check_threads
from kvist.errors import OptionError
from kvist.kv_format import LayerFormats, check_distinct

if TYPE_CHECKING:
    from rich.table import Table

    from kvist.bench.attention import AttentionShape
    from kvist.bench.machine import MachineFacts
    from kvist.bench.probed import Timing

FORMATS = ("bf16", "int8", "int4")
_STANDARD_OUTPUT = Path("-")
_SHARED = ", shared prefix"


def attention(
    heads: Annotated[int, typer.Option(help="Query heads.", metavar="N")] = 9,
    kv_heads: Annotated[int, typer.Option(help="KV heads.", metavar="N")] = 3,
    head_dim: Annotated[int, typer.Option(help="Dims of a head.", metavar="N")] = 64,
    context: Annotated[int, typer.Option(help="Tokens of each sequence.", metavar="N")] = 8192,
    batch: Annotated[int, typer.Option(help="Sequences.", metavar="N")] = 1,
    layers: Annotated[int, typer.Option(help="Layers, each with memory of its own.", metavar="N")] = 30,
    kv_format: Annotated[
        list[str] | None,
        typer.Option(
            help="A format to measure; may be given several times.", metavar="FORMAT", show_default=" ".join(FORMATS)
        ),
    ] = None,
    prefill: Annotated[bool, typer.Option("--prefill", help="Measure prefill in place of decode.")] = False,
    shared_prefix: Annotated[
        bool, typer.Option("--shared-prefix", help="The same batch as forks of one sequence beside it.")
    ] = False,
    pytorch: Annotated[bool, typer.Option("--pytorch", help="PyTorch's own forms of decode beside it.")] = False,
    repetitions: Annotated[int, typer.Option(help="That count, of each format.", metavar="N", min=1)] = 7,
    json: Annotated[
        Path | None, typer.Option(help="Write one JSON object; - prints it and nothing else.", metavar="FILE")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw tokens per second: .png, .svg or .pdf.", metavar="FILE")
    ] = None,
    threads: options.ThreadsOption = None,
) -> None:
    """How fast attention reads the cache, in each format, beside the bandwidth of the moment.

    Keys, values and queries are random, and every layer has memory of its own, more than the caches hold. Formats are
    timed in turn; a repetition counts only where the read bandwidth before and after it is the same within 10 %.
    """
    formats = check_distinct(map(LayerFormats.parse, kv_format or FORMATS))
    if threads is not None:
        check_threads("threads", threads)
    if pytorch and prefill:
        raise OptionError("--pytorch has forms of decode only: leave out --prefill")

    if shared_prefix and (prefill or batch < 2):
        raise OptionError("--shared-prefix is for decoding several sequences: give --batch N, and leave out --prefill")

    options.prepare_to_compute()
    from kvist.bench.attention import AttentionShape

    shape = AttentionShape(heads, kv_heads, head_dim, context, batch, layers)
    alone = json == _STANDARD_OUTPUT
    with output_file("--json", None if alone else json) as json_file, output_file("--plot", plot) as plot_file:
        kind = ""
        if plot is not None:
            from kvist.evaluate.plot import check_plot

            kind = check_plot(plot)
        report = _measure(shape, formats, repetitions, threads, prefill=prefill, shares=shared_prefix, pytorch=pytorch)
        if json_file is not None:
            json_file.write(lambda path: path.write_text(report.json() + "\n", encoding="utf-8"))
        if plot_file is not None:
            from kvist.bench.plot import write_bars

            bars = {row.name: row.tokens_per_s for row in report.rows}
            plot_file.write(lambda path: write_bars(path, kind, bars, "tokens per second", report.title))
    if alone:
        print(report.json())
    else:
        print(report.title)
        table_console().print(report.table())
        print(report.facts)


@dataclass(frozen=True)
class Row:
    """What one format, or form of PyTorch, came to.

    Attributes:
        name: of the format or form.
        tokens_per_s: of all sequences together.
        bytes_per_token: of keys and values, of all layers.
        gb_per_s: of keys and values that decode had to read, a shared prefix once; None in prefill.
        roofline_fraction: of the read bandwidth around it; None in prefill.
        gflop_per_s: of the causal products; None in decode.
        bandwidth_gb_per_s: around it.
        repetitions, discarded: that counted, and that did not since the bandwidth moved.
        is_steady: whether enough counted.
    """

    name: str
    tokens_per_s: float
    bytes_per_token: int
    gb_per_s: float | None
    roofline_fraction: float | None
    gflop_per_s: float | None
    bandwidth_gb_per_s: float
    repetitions: int
    discarded: int
    is_steady: bool


@dataclass(frozen=True)
class Report:
    """All rows, and what they were taken on."""

    shape: AttentionShape
    machine: MachineFacts
    rows: tuple[Row, ...]
    peak_gflop_per_s: dict[str, float] | None

    @property
    def title(self) -> str:
        shape = self.shape
        work = "decode" if self.peak_gflop_per_s is None else "prefill"
        return (
            f"{work}, {shape.num_heads} query heads over {shape.num_kv_heads} KV heads of {shape.head_dim} dims, "
            f"{shape.context:,} tokens, batch {shape.batch}, {shape.layers} layers"
        )

    @property
    def facts(self) -> str:
        """What the figures rest on, in a line or two."""
        machine = self.machine
        facts = (
            f"{machine.cpu}, {machine.isa or 'no native kernels'}, {machine.threads} threads on {machine.cpus} CPUs; "
            f"kvist {machine.kvist}, torch {machine.torch}"
        )
        if self.peak_gflop_per_s is not None:
            peaks = ", ".join(f"{value:,.0f} in {name}" for name, value in self.peak_gflop_per_s.items())
            facts += f"\nproducts of large matrices reach, Gflop/s: {peaks}"
        if not all(row.is_steady for row in self.rows):
            facts += "\n? the bandwidth moved by more than 10 % around most repetitions"
        return facts

    def json(self) -> str:
        fields: dict[str, Any] = {
            "work": "decode" if self.peak_gflop_per_s is None else "prefill",
            "shape": asdict(self.shape),
            "rows": [asdict(row) for row in self.rows],
            "peak_gflop_per_s": self.peak_gflop_per_s,
            "machine": asdict(self.machine),
        }
        return json_module.dumps(fields, allow_nan=False)

    def table(self) -> Table:
        from rich.table import Table

        table = Table(box=None, pad_edge=False)
        table.add_column("kv_format")
        of_decode = ("tokens/s", "bytes/token", "GB/s", "bandwidth", "fraction")
        of_prefill = ("tokens/s", "bytes/token", "Gflop/s")
        for name in of_decode if self.peak_gflop_per_s is None else of_prefill:
            table.add_column(name, justify="right")
        for row in self.rows:
            cells = [row.name, f"{row.tokens_per_s:,.1f}", f"{row.bytes_per_token:,}"]
            if row.gflop_per_s is not None:
                cells.append(f"{row.gflop_per_s:,.0f}")
            else:
                unsteady = "" if row.is_steady else " ?"
                cells += [
                    f"{row.gb_per_s or 0:.1f}",
                    f"{row.bandwidth_gb_per_s:.1f}",
                    f"{row.roofline_fraction or 0:.0%}{unsteady}",
                ]
            table.add_row(*cells)
        return table


def _measure(
    shape: AttentionShape,
    formats: tuple[LayerFormats, ...],
    repetitions: int,
    threads: int | None,
    *,
    prefill: bool,
    shares: bool,
    pytorch: bool,
) -> Report:
    import torch

    from kvist.bench.attention import FilledCache, peak_flop_per_s, torch_forms
    from kvist.bench.machine import MachineFacts
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
        timings = time_in_turn(
            tasks,
            repetitions,
            lambda: max(native.read_rates(passes=2)),
            done=lambda turn, turns: progress("measuring", turn, turns),
        )
    peaks = None
    if prefill:
        peaks = {name: peak_flop_per_s(getattr(torch, name)) / 1e9 for name in ("bfloat16", "int8")}
    tokens, flop = (tokens_read, shape.prefill_flop) if prefill else (shape.batch, None)
    # What is shared need be read once.
    rows = tuple(
        _row(
            name, timing, tokens, bytes_per_token[name], shape.context if name.endswith(_SHARED) else tokens_read, flop
        )
        for name, timing in timings.items()
    )
    return Report(shape, MachineFacts.gather(torch.get_num_threads()), rows, peaks)


def _row(name: str, timing: Timing, tokens: int, bytes_per_token: int, tokens_read: int, flop: int | None) -> Row:
    read_per_s = bytes_per_token * tokens_read / timing.seconds
    return Row(
        name=name,
        tokens_per_s=tokens / timing.seconds,
        bytes_per_token=bytes_per_token,
        gb_per_s=None if flop is not None else read_per_s / 1e9,
        roofline_fraction=None if flop is not None else read_per_s / timing.bytes_per_s,
        gflop_per_s=None if flop is None else flop / timing.seconds / 1e9,
        bandwidth_gb_per_s=timing.bytes_per_s / 1e9,
        repetitions=timing.repetitions,
        discarded=timing.discarded,
        is_steady=timing.is_steady,
    )
