"""A model that is to be measured: loaded once, with a cache in each format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvist.cli import options
from kvist.cli.bench_report import Subject
from kvist.cli.progress import progress_bar
from kvist.cli.reading import read_bytes
from kvist.config import WEIGHTS_FORMATS, check_format, check_threads
from kvist.kv_format import LayerFormats

if TYPE_CHECKING:
    from kvist.bench.format_runs import FormatRuns
    from kvist.bench.machine import MachineFacts
    from kvist.bench.memory import MemoryFigures
    from kvist.bench.probed import Measured
    from kvist.evaluate.text_windows import EvaluationText
    from kvist.loading import LoadedModel
    from kvist.loading.progress import Progress


@dataclass(frozen=True)
class Asked:
    """The options that all measurements of a model share, checked before it is loaded.

    Args:
        model, weights_format: what to load.
        formats: of the cache.
        text: to run over; None for the one that comes with Kvist.
        repetitions: that are to count.
        threads: to compute with; None for one per core.

    Raises:
        OptionError: one cannot be honoured.
    """

    model: str
    weights_format: str | None
    formats: tuple[LayerFormats, ...]
    text: Path | None
    repetitions: int
    threads: int | None

    def __post_init__(self) -> None:
        if self.weights_format is not None:
            check_format("weights_format", self.weights_format, WEIGHTS_FORMATS)
        if self.threads is not None:
            check_threads("threads", self.threads)


@dataclass(frozen=True)
class BenchModel:
    """A loaded model and its caches.

    Attributes:
        machine: the facts.
        subject: what is measured.
        loaded: the model.
        runs: for the name of each format, the sequences in it.
        program_bytes: that the process had before the model was loaded.
        repetitions: that are to count.
        progress: told how far everything is.
    """

    machine: MachineFacts
    subject: Subject
    loaded: LoadedModel
    runs: dict[str, FormatRuns]
    program_bytes: int
    repetitions: int
    progress: Progress

    def filled(self, run: Callable[[FormatRuns], Measured]) -> tuple[MemoryFigures, ...]:
        """Do in each format once what takes the most memory, before anything is timed."""
        from kvist.bench.rates import filled

        return filled(
            self.runs,
            run,
            program_bytes=self.program_bytes,
            weights_bytes=self.loaded.weights_bytes,
            progress=self.progress,
        )

    def bandwidth(self) -> float:
        """The read bandwidth of the moment, bytes per second."""
        from kvist.kernels import native

        return max(native.read_rates(passes=2))


@contextmanager
def bench_model(asked: Asked, lengths: Sequence[int], new_tokens: int, *, kept: bool) -> Iterator[BenchModel]:
    """Load the model and make its caches.

    Args:
        asked: the options.
        lengths, new_tokens, kept: of the `bench.format_runs.Workload`.
    """
    options.prepare_to_compute()
    text = _text(asked.text)

    import torch

    from kvist.bench.format_runs import FormatRuns, Workload
    from kvist.bench.machine import MachineFacts
    from kvist.bench.memory import resident_bytes
    from kvist.bench.prompts import Prompts
    from kvist.loading import load

    if asked.threads is not None:
        torch.set_num_threads(asked.threads)
    program_bytes = resident_bytes()
    workload = Workload(tuple(lengths), new_tokens, kept)
    with progress_bar() as progress:
        loaded = load(asked.model, asked.weights_format, progress=progress)
        workload.check(loaded, asked.formats)
        prompts = Prompts(loaded.tokenizer, text.text)
        quantised = any(kv_format.quantised_keys for kv_format in asked.formats)
        key_statics = loaded.key_statics(progress) if quantised else None
        runs = {
            str(kv_format): FormatRuns(loaded, kv_format, prompts, workload, key_statics) for kv_format in asked.formats
        }
        machine, subject = MachineFacts.gather(torch.get_num_threads()), Subject.of(loaded, text.name)
        yield BenchModel(machine, subject, loaded, runs, program_bytes, asked.repetitions, progress)


def _text(path: Path | None) -> EvaluationText:
    from kvist.bench.prompts import SHIPPED_TEXT
    from kvist.evaluate.text_windows import EvaluationText

    if path == Path("-"):
        return EvaluationText.of(read_bytes(), "standard input")
    return EvaluationText.read(SHIPPED_TEXT if path is None else path)
