"""`kvist bench products`: products with weights by themselves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvist.cli import bench_options, options
from kvist.cli.bench_report import BenchReport, new_table, produce
from kvist.cli.progress import progress_bar
from kvist.config import check_format, check_threads

if TYPE_CHECKING:
    from rich.table import Table

    from kvist.bench.products import MatrixShape, ProductRow

_MOST_ROWS = 1 << 16


def products(
    shapes: Annotated[
        str, typer.Option(help="Rows and columns of matrices, several with commas.", metavar="NxK,NxK")
    ] = "1536x576,4096x4096",
    rows: Annotated[
        str, typer.Option(help="Rows of the input, several numbers with commas.", metavar="N,N")
    ] = "1,8,1024",
    weights_format: Annotated[
        str,
        typer.Option(
            help="Formats with commas: int8, int4, int4_min (int4 with a minimum), bf16.", metavar="FORMAT,FORMAT"
        ),
    ] = "int8,int4",
    repetitions: bench_options.RepetitionsOption = 7,
    json: bench_options.JsonOption = None,
    plot: bench_options.PlotOption = None,
    threads: options.ThreadsOption = None,
) -> None:
    """How fast rows meet weights, quantised or in bf16.

    Beside them stand PyTorch's products in bf16 and int8. One row is bound by reading the weights, many by arithmetic.
    Weights and rows are random; the products of a run have copies of the matrix in turn, more of them than the
    processor's caches hold. All are timed in turn; a repetition counts only where the read bandwidth before and after
    it is the same within 10 %.
    """
    counts = bench_options.numbers("rows", rows, _MOST_ROWS)
    if threads is not None:
        check_threads("threads", threads)
    options.prepare_to_compute()
    from kvist.bench.products import PRODUCT_FORMATS, MatrixShape

    matrices = [MatrixShape.parse(part.strip()) for part in dict.fromkeys(shapes.split(","))]
    formats = [name.strip() for name in dict.fromkeys(weights_format.split(","))]
    for name in formats:
        check_format("weights_format", name, PRODUCT_FORMATS)
    produce(lambda: _measure(matrices, counts, formats, repetitions, threads), json=json, plot=plot)


@dataclass(frozen=True)
class ProductsReport(BenchReport):
    """Products with matrices of several shapes in several formats."""

    rows: tuple[ProductRow, ...]

    @property
    def work(self) -> str:
        return "products"

    @property
    def title(self) -> str:
        return "products of rows with matrices of weights, and PyTorch's"

    @property
    def is_steady(self) -> bool:
        return all(row.is_steady for row in self.rows)

    def figures(self) -> dict[str, Any]:
        return {"rows": [asdict(row) for row in self.rows]}

    def tables(self) -> Iterable[Table]:
        for shape in dict.fromkeys(row.shape for row in self.rows):
            columns = ("rows", "us", "to one", "GB/s", "bandwidth", "fraction", "Gop/s", "spread")
            table = new_table(shape, *columns)
            for row in (row for row in self.rows if row.shape == shape):
                table.add_row(
                    row.name,
                    f"{row.rows:,}",
                    f"{row.seconds * 1e6:,.1f}",
                    "" if row.ratio_to_one is None else f"{row.ratio_to_one:.2f}",
                    f"{row.gb_per_s:.1f}",
                    f"{row.bandwidth_gb_per_s:.1f}",
                    f"{row.roofline_fraction:.0%}",
                    f"{row.gop_per_s:,.0f}",
                    f"{row.spread_fraction:.0%}" + ("" if row.is_steady else " ?"),
                )
            yield table

    def draw(self, path: Path, kind: str) -> None:
        from kvist.bench.plot import write_bars

        bars = {f"{row.shape} {row.name}, {row.rows:,} rows": row.gop_per_s for row in self.rows}
        write_bars(path, kind, bars, "billion operations per second", self.title)


def _measure(
    matrices: list[MatrixShape], rows: tuple[int, ...], formats: list[str], repetitions: int, threads: int | None
) -> ProductsReport:
    import torch

    from kvist.bench.machine import MachineFacts
    from kvist.bench.products import product_rows
    from kvist.kernels import native

    if threads is not None:
        torch.set_num_threads(threads)
    found: list[ProductRow] = []
    with progress_bar() as progress:
        for shape in matrices:
            found += product_rows(
                shape,
                rows,
                formats,
                repetitions,
                lambda: max(native.read_rates(passes=2)),
                partial(progress, f"measuring {shape}"),
            )
    return ProductsReport(MachineFacts.gather(torch.get_num_threads()), tuple(found))
