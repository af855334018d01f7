"""What a measurement prints and writes."""

from __future__ import annotations

import json as json_module
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvist.cli.output import in_bf16, table_console
from kvist.cli.output_file import check_apart, output_file

if TYPE_CHECKING:
    from rich.table import Table

    from kvist.bench.machine import MachineFacts
    from kvist.bench.memory import MemoryFigures
    from kvist.loading import LoadedModel

_STANDARD_OUTPUT = Path("-")


@dataclass(frozen=True)
class Subject:
    """What was measured.

    Attributes:
        model: what it goes by.
        weights_format, weights_bytes: of its weights.
        bf16_matrices: those that the format does not fit.
        kernel: that attends.
        text: the name of the text that it ran over.
    """

    model: str
    weights_format: str
    weights_bytes: int
    bf16_matrices: tuple[str, ...]
    kernel: str
    text: str

    @classmethod
    def of(cls, loaded: LoadedModel, text: str) -> Subject:
        from kvist.attention import kernel_name

        return cls(
            model=loaded.name,
            weights_format=loaded.weights_format,
            weights_bytes=loaded.weights_bytes,
            bf16_matrices=loaded.bf16_matrices,
            kernel=kernel_name(loaded.decoder.device),
            text=text,
        )


@dataclass(frozen=True)
class BenchReport(ABC):
    """Figures, and what they rest on.

    Attributes:
        machine: the facts.
    """

    machine: MachineFacts

    @property
    @abstractmethod
    def work(self) -> str:
        """What was measured, in a word or two."""

    @property
    @abstractmethod
    def is_steady(self) -> bool:
        """Whether the bandwidth stayed the same around enough repetitions."""

    @abstractmethod
    def figures(self) -> dict[str, Any]:
        """The figures as `--json` gives them."""

    @abstractmethod
    def tables(self) -> Iterable[Table]:
        """The figures for a person."""

    @abstractmethod
    def draw(self, path: Path, kind: str) -> None:
        """Draw them into a file of a kind."""

    @property
    @abstractmethod
    def title(self) -> str:
        """What was measured, in a line."""

    @property
    def facts(self) -> str:
        """What the figures rest on, in a line or two."""
        unsteady = "" if self.is_steady else "\n? the bandwidth moved by more than 10 % around most repetitions"
        return self.machine.line + unsteady

    def fields(self) -> dict[str, Any]:
        """What stands in the JSON beside the machine."""
        return {"work": self.work, **self.figures()}

    def json(self) -> str:
        return json_module.dumps({**self.fields(), "machine": asdict(self.machine)}, allow_nan=False)

    def all_tables(self) -> Iterable[Table]:
        """Those of the figures, and what belongs below them."""
        return self.tables()


@dataclass(frozen=True)
class ModelReport(BenchReport):
    """Figures of a model.

    Attributes:
        subject: what was measured.
        memory: that the runs took.
    """

    subject: Subject
    memory: tuple[MemoryFigures, ...]

    @property
    def title(self) -> str:
        return f"{self.work}, {self.subject.model}, {self.subject.weights_format} weights"

    @property
    def facts(self) -> str:
        return "\n".join([super().facts, *in_bf16(self.subject.bf16_matrices)])

    def fields(self) -> dict[str, Any]:
        memory = [{**asdict(one), "predicted_bytes": one.predicted_bytes} for one in self.memory]
        return {"work": self.work, **asdict(self.subject), **self.figures(), "memory": memory}

    def all_tables(self) -> Iterable[Table]:
        """Those of the figures, and that of the memory."""
        return (*self.tables(), *([self.memory_table()] if self.memory else []))

    def memory_table(self) -> Table:
        table = new_table("MiB", "program", "weights", "caches", "predicted", "peak")
        for one in self.memory:
            sizes = (one.program_bytes, one.weights_bytes, one.kv_bytes, one.predicted_bytes, one.peak_bytes)
            table.add_row(one.name, *(f"{size / 2**20:,.0f}" for size in sizes))
        return table


def new_table(*columns: str, names: int = 1) -> Table:
    """A table whose first columns hold `names`, and the others numbers."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < names else "right", no_wrap=True)
    return table


def produce(
    measure: Callable[[], BenchReport], *, json: Path | None, plot: Path | None, text: Path | None = None
) -> None:
    """Measure, write the files that are asked for, and print the report, or its JSON alone.

    Args:
        measure: gives the report.
        json, plot: the files to write.
        text: a file that is read, which none of them may be.

    Raises:
        OptionError: a file cannot be written; told before anything is measured where it can be.
    """
    alone = json == _STANDARD_OUTPUT
    check_apart({"--text": text, "--json": json, "--plot": plot})
    with output_file("--json", None if alone else json) as json_file, output_file("--plot", plot) as plot_file:
        kind = ""
        if plot is not None:
            from kvist.evaluate.plot import check_plot

            kind = check_plot(plot)
        report = measure()
        try:
            if json_file is not None:
                json_file.write(lambda path: path.write_text(report.json() + "\n", encoding="utf-8"))
            if plot_file is not None:
                plot_file.write(lambda path: report.draw(path, kind))
        finally:  # a full disk must not cost the minutes that the figures took
            if alone:
                print(report.json())
            else:
                _print(report)


def _print(report: BenchReport) -> None:
    console = table_console()
    print(report.title)
    for table in report.all_tables():
        console.print(table)
        print()
    print(report.facts)
