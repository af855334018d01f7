"""`kvist bench`: measurements, each beside the facts of the machine that it was taken on."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from kvist.cli.bench_attention import attention
from kvist.cli.bench_decode import batch, decode
from kvist.cli.bench_heads import heads
from kvist.cli.bench_prefill import prefill
from kvist.cli.bench_products import products
from kvist.config import check_threads

if TYPE_CHECKING:
    from kvist.bench.bandwidth import ReadBandwidth
    from kvist.bench.machine import MachineFacts

app = typer.Typer(help="Measure this machine.", no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure this machine."""


for _verb in (attention, products, decode, prefill, batch, heads):
    app.command()(_verb)


@app.command()
def bandwidth(
    threads: Annotated[
        int | None, typer.Option(help="Threads that read.", metavar="N", show_default="one per core")
    ] = None,
    passes: Annotated[int, typer.Option(help="How often to read the buffer.", metavar="N", min=1)] = 10,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """How fast this machine reads memory.

    It is the most that a decoder, which mostly reads, can come to.
    """
    if threads is not None:
        check_threads("threads", threads)

    from kvist.bench.bandwidth import measure
    from kvist.bench.machine import MachineFacts

    result = measure(threads=threads, passes=passes)
    facts = MachineFacts.gather(result.threads)
    if json_output:
        figures = {
            "best_bytes_per_s": result.best_bytes_per_s,
            "median_bytes_per_s": result.median_bytes_per_s,
            "spread_fraction": result.spread_fraction,
            "bytes_per_s": result.bytes_per_s,
        }
        print(json.dumps({"read_bandwidth": figures, "machine": asdict(facts)}))
    else:
        _print_table(result, facts)


def _print_table(result: ReadBandwidth, facts: MachineFacts) -> None:
    from rich.table import Table

    from kvist.cli.output import table_console
    from kvist.memory import binary_size

    cache = facts.last_level_cache_bytes
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for label, value in (
        ("best", _gigabytes(result.best_bytes_per_s)),
        ("median", _gigabytes(result.median_bytes_per_s)),
        ("spread", f"{result.spread_fraction:.0%} of the median, over {len(result.bytes_per_s)} passes"),
        ("threads", f"{facts.threads} on {facts.cpus} CPUs"),
        ("cpu", f"{facts.cpu} ({facts.architecture})"),
        ("kernels", facts.isa or "none"),
        ("cache", "unknown" if cache is None else f"{binary_size(cache)} at the last level"),
        ("memory", binary_size(facts.memory_bytes)),
        ("versions", f"kvist {facts.kvist}, torch {facts.torch}, python {facts.python}, {facts.system}"),
    ):
        table.add_row(label, value)
    table_console().print(table)


def _gigabytes(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.1f} GB/s"
