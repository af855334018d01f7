"""What an evaluation came to, as a table, as JSON, and while it runs."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version

import torch
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvist.cli.output import in_bf16, print_note, screen_width
from kvist.evaluate.eval_config import EvalConfig
from kvist.evaluate.evaluation import Evaluation
from kvist.evaluate.text_windows import EvaluationText

# Whoever waits longer for the end, without a terminal to look at, is told.
_LONG_S = 60.0


@dataclass(frozen=True)
class EvalReport:
    """The figures, and what they hold for.

    Attributes:
        model: its name.
        text: that was predicted.
        config: what was asked for.
        bf16_matrices: those that the format of the weights does not fit.
        evaluation: as far as it went.
    """

    model: str
    text: EvaluationText
    config: EvalConfig
    bf16_matrices: tuple[str, ...]
    evaluation: Evaluation

    def json(self) -> str:
        """One line, in UTF-8 as it is."""
        settings = {
            "model": self.model,
            "text": self.text.name,
            "text_sha256": self.text.sha256,
            "weights_format": self.config.weights_format,
            "bf16_matrices": self.bf16_matrices,
            "window": self.config.window,
            "every": self.config.every,
            "threads": torch.get_num_threads(),
            "kvist": version("kvist"),
            "torch": torch.__version__,
        }
        return json.dumps(settings | asdict(self.evaluation), ensure_ascii=False, allow_nan=False)

    @property
    def title(self) -> str:
        """What the figures are of."""
        windows, every = self.evaluation.windows, self.config.every
        counted = f"{windows:,} window{'s' * (windows != 1)} of {self.config.window:,} tokens"
        scored = "" if every == 1 else f", one position in {every:,}"
        weights = ", ".join([f"weights in {self.config.weights_format}", *in_bf16(self.bf16_matrices)])
        return f"{self.model} on {self.text.name}, {counted}{scored}, {weights}"

    def table(self) -> RenderableType:
        """The same for a person."""
        found = self.evaluation
        reference = (
            "reference: the same model with fp32 cache, weights and compute; "
            f"perplexity {found.reference_perplexity:.3f}; {_duration(found.reference_seconds)}; "
            f"{found.positions:,} positions scored"
        )
        return Group(Text(self.title), format_table(found), Text(reference, style="dim"))


def format_table(evaluation: Evaluation) -> Table:
    """A row for each format."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("kv_format", overflow="fold", vertical="bottom")
    for heading in (
        "bytes/\ntoken",
        "mean\ndivergence",
        "99%\ndivergence",
        "agreement",
        "perplexity",
        "time",
    ):
        table.add_column(heading, justify="right", no_wrap=True, vertical="bottom")
    for row in evaluation.rows:
        table.add_row(
            Text(row.kv_format),
            f"{row.kv_bytes_per_token:,}",
            _small(row.kl_mean),
            _small(row.kl_p99),
            f"{row.top1_agreement:.2%}",
            f"{row.perplexity:.3f}",
            _duration(row.seconds),
        )
    return table


class EvalProgress:
    """The table as it fills, and what runs now: on standard error where that is a terminal.

    Elsewhere it is a line after the first window, where the others will take long.

    Args:
        windows: how many there will be.
    """

    def __init__(self, windows: int) -> None:
        self._windows = windows
        self._latest: Evaluation | None = None
        self._began_s = time.monotonic()
        self._live: Live | None = None

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Draw within, and leave nothing behind."""
        if not sys.stderr.isatty():
            yield
            return
        console = Console(stderr=True, highlight=False, width=screen_width())
        with Live(console=console, auto_refresh=False, transient=True) as self._live:
            yield

    def started(self, window: int, name: str) -> None:
        """Tell which pass over which window runs now."""
        done = 0 if self._latest is None else self._latest.windows
        left = f", about {_duration(self._left_s())} left" if done else ""
        self._draw(f"window {window + 1:,} of {self._windows:,}, {name}{left}")

    def done(self, latest: Evaluation) -> None:
        """Tell what is known now."""
        self._latest = latest
        if self._live is None and latest.windows == 1 and (left_s := self._left_s()) > _LONG_S:
            print_note(
                f"1 of {self._windows:,} windows is through, the others take about {_duration(left_s)}: --windows, "
                "--window and --every make it less"
            )

    def _left_s(self) -> float:
        done = 0 if self._latest is None else self._latest.windows
        return (time.monotonic() - self._began_s) / max(1, done) * (self._windows - done)

    def _draw(self, status: str) -> None:
        if self._live is not None:
            known = [] if self._latest is None else [format_table(self._latest)]
            self._live.update(Group(*known, Text(status, style="dim")), refresh=True)


def _small(number: float) -> str:
    """Three digits that say something, without an exponent: `0.000113`."""
    if abs(number) < 1e-9:
        return "0"
    return f"{number:.{max(0, 2 - math.floor(math.log10(abs(number))))}f}"


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:.1f} min"
