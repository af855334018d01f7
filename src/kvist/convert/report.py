"""A converted model beside its source: how it predicts, what its cache takes, how fast it decodes."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from kvist.bench.format_runs import FormatRuns, Workload
from kvist.bench.machine import MachineFacts
from kvist.bench.memory import resident_bytes
from kvist.bench.probed import Timing, time_in_turn
from kvist.bench.prompts import Prompts
from kvist.bench.step_bytes import StepBytes, cache_read, weights_read
from kvist.convert.bigram import BigramModel
from kvist.convert.record import CONVERSION_FILE
from kvist.convert.report_config import ReportConfig
from kvist.convert.uptrain_curve import CURVE_FILE, Curve
from kvist.errors import ModelNotFoundError, OptionError
from kvist.evaluate.evaluation import evaluate
from kvist.evaluate.text_windows import EvaluationText, text_windows
from kvist.kernels import native
from kvist.loading import LoadedModel, load
from kvist.loading.progress import Progress, no_progress
from kvist.loading.untrusted_file import read_json


@dataclass(frozen=True)
class Prediction:
    """How well something predicts the text.

    Attributes:
        name: of it.
        loss, perplexity: nats per token, and e to that.
        kl_mean: KL(source || it), nats per token; None where that was not compared.
        top1_agreement: how often its likeliest token is the source's; None too.
    """

    name: str
    loss: float
    perplexity: float
    kl_mean: float | None = None
    top1_agreement: float | None = None

    @classmethod
    def of_loss(cls, name: str, loss: float) -> Prediction:
        return cls(name, loss, math.exp(loss))


@dataclass(frozen=True)
class CacheRow:
    """What a sequence takes in the cache.

    Attributes:
        context: its tokens.
        source_bytes, converted_bytes: by the formula that the cache allocates by.
        source_measured_bytes, converted_measured_bytes: by how much the process grew; None where it was not looked at.
    """

    context: int
    source_bytes: int
    converted_bytes: int
    source_measured_bytes: int | None = None
    converted_measured_bytes: int | None = None


@dataclass(frozen=True)
class SpeedRow:
    """How fast a sequence is decoded; both models in turn, in one run.

    Attributes:
        context: tokens in the cache.
        source_tokens_per_s, converted_tokens_per_s: that were measured.
        ratio: of the second to the first.
        bytes_ratio: of the bytes that a step of the source and of the converted model must read: what the ratio would
            be if nothing but reading took time.
        is_steady: whether the read bandwidth stayed the same around enough repetitions.
    """

    context: int
    source_tokens_per_s: float
    converted_tokens_per_s: float
    ratio: float
    bytes_ratio: float
    is_steady: bool


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion came to.

    Attributes:
        source, converted: names of the models.
        text: the name of the one that was predicted.
        num_heads, source_kv_heads, converted_kv_heads: of a layer.
        positions: of the text that were scored.
        predictions: the source's first, then the converted model's, and what they are measured by.
        cache, speeds: a row for each context.
        config: what was asked for.
        record: what `conversion.json` says; empty where there is none.
        curve: of the last training; None where there was none.
        machine: what it was measured on, in a line.
    """

    source: str
    converted: str
    text: str
    num_heads: int
    source_kv_heads: int
    converted_kv_heads: int
    positions: int
    predictions: tuple[Prediction, ...]
    cache: tuple[CacheRow, ...]
    speeds: tuple[SpeedRow, ...]
    config: ReportConfig
    record: dict[str, object]
    curve: Curve | None
    machine: str

    def figures(self) -> dict[str, object]:
        """All of it as plain values."""
        fields = {name: value for name, value in vars(self).items() if name not in ("curve", "config")}
        rows = {name: [asdict(row) for row in fields[name]] for name in ("predictions", "cache", "speeds")}
        settings = vars(self.config) | {"kv_format": str(self.config.kv_format)}
        return fields | rows | {"settings": settings}


def conversion_report(
    source: str,
    directory: Path,
    text: EvaluationText,
    config: ReportConfig,
    *,
    bigram_text: EvaluationText | None = None,
    progress: Progress = no_progress,
) -> ConversionReport:
    """Measure a converted model beside its source.

    Args:
        source: the model that it was converted from, by path, name or Hub id.
        directory: of the converted model.
        text: that both predict.
        config: how much.
        bigram_text: what a bigram model is fitted on, to compare with; None for no such model.
        progress: told how far it is.

    Raises:
        OptionError: the two do not belong together.
        KvistError: a model cannot be loaded, or the text or a context does not fit it.
    """
    if not directory.is_dir():
        raise ModelNotFoundError(f"there is no folder {directory}: give one that `kvist convert gqa` made")
    predictions, positions, before, after = _predictions(source, directory, text, config, bigram_text, progress)
    gc.collect()  # the fp32 weights: what is timed should have the memory to itself
    cache, speeds = _measured(source, directory, text, config, progress)
    curve = directory / CURVE_FILE
    return ConversionReport(
        source=before.name,
        converted=after.name,
        text=text.name,
        num_heads=after.num_heads,
        source_kv_heads=before.num_kv_heads,
        converted_kv_heads=after.num_kv_heads,
        positions=positions,
        predictions=predictions,
        cache=cache,
        speeds=speeds,
        config=config,
        record=read_json(directory / CONVERSION_FILE) if (directory / CONVERSION_FILE).is_file() else {},
        curve=Curve.read(curve) if curve.is_file() else None,
        machine=MachineFacts.gather(torch.get_num_threads()).line,
    )


@dataclass(frozen=True)
class _Heads:
    name: str
    num_heads: int
    num_kv_heads: int


def _predictions(
    source: str,
    directory: Path,
    text: EvaluationText,
    config: ReportConfig,
    bigram_text: EvaluationText | None,
    progress: Progress,
) -> tuple[tuple[Prediction, ...], int, _Heads, _Heads]:
    before, after = load(source, "fp32", progress=progress), load(directory.absolute(), "fp32", progress=progress)
    _check_same_vocabulary(before, after, text)
    _workload(config).check(before, [config.kv_format])  # before the minutes that predicting takes
    asked = config.evaluation()
    windows = text_windows(before.tokenizer, before.config, text.text, asked)
    found = None
    for found in evaluate(before.decoder, after.decoder, windows, asked):
        progress("predicting the text", found.windows, len(windows))
    assert found is not None
    (row,) = found.rows
    predictions = [
        Prediction(before.name, math.log(found.reference_perplexity), found.reference_perplexity),
        Prediction(after.name, math.log(row.perplexity), row.perplexity, row.kl_mean, row.top1_agreement),
    ]
    vocab_size = before.config.vocab_size
    if bigram_text is not None:
        ids = torch.tensor(before.tokenizer.encode(bigram_text.text, add_special_tokens=False))
        loss = BigramModel(ids, vocab_size).loss(torch.tensor(windows))
        predictions.append(Prediction.of_loss(f"bigram model of {bigram_text.name}", loss))
    predictions.append(Prediction.of_loss("uniform guessing", math.log(vocab_size)))
    heads = [_Heads(model.name, model.config.num_heads, model.config.num_kv_heads) for model in (before, after)]
    return tuple(predictions), found.positions, heads[0], heads[1]


def _check_same_vocabulary(before: LoadedModel, after: LoadedModel, text: EvaluationText) -> None:
    if before.config.vocab_size != after.config.vocab_size or (
        before.tokenizer.encode(text.text) != after.tokenizer.encode(text.text)
    ):
        raise OptionError(
            f"{before.name} has another vocabulary than {after.name}: give the model that it was converted from"
        )


def _measured(
    source: str, directory: Path, text: EvaluationText, config: ReportConfig, progress: Progress
) -> tuple[tuple[CacheRow, ...], tuple[SpeedRow, ...]]:
    longest = max(config.contexts)
    workload = _workload(config)
    models: list[LoadedModel] = []
    runs: list[FormatRuns] = []
    grown: list[int] = []
    for model in (source, directory.absolute()):
        loaded = load(model, config.weights_format, progress=progress)
        workload.check(loaded, [config.kv_format])
        statics = loaded.key_statics(progress) if config.kv_format.quantised_keys else None
        prompts = Prompts(loaded.tokenizer, text.text)
        make = partial(FormatRuns, loaded, config.kv_format, prompts, workload, statics)
        progress("filling the cache", len(models), 2)
        of_model, measured = _filled(make, longest)
        models.append(loaded)
        runs.append(of_model)
        grown.append(measured)
    cache = []
    for context in config.contexts:
        predicted = [of_model.plan.bytes_for(context) for of_model in runs]
        measured_here = grown if context == longest else [None, None]
        cache.append(CacheRow(context, *predicted, *measured_here))
    try:
        return tuple(cache), _speeds(models, runs, config, progress)
    finally:
        for of_model in runs:
            of_model.close()


def _workload(config: ReportConfig) -> Workload:
    return Workload((max(config.contexts),), config.new_tokens, kept=True)


def _filled(make: Callable[[], FormatRuns], context: int) -> tuple[FormatRuns, int]:
    """Runs with a prompt in the cache, and by how much the process grew for it.

    What the computation itself takes and keeps, a run before has taken already.
    """
    earlier = make()
    earlier.decode(context)
    earlier.close()
    del earlier
    gc.collect()
    before = resident_bytes()
    runs = make()
    runs.decode(context)
    return runs, max(0, resident_bytes() - before)


def _speeds(
    models: Sequence[LoadedModel], runs: Sequence[FormatRuns], config: ReportConfig, progress: Progress
) -> tuple[SpeedRow, ...]:
    rows = {}
    for done, context in enumerate(sorted(config.contexts, reverse=True)):  # shorter ones are found in the cache
        progress("timing", done, len(config.contexts))
        tasks = {index: partial(of_model.decode, context) for index, of_model in enumerate(runs)}
        timings = time_in_turn(tasks, config.repetitions, lambda: max(native.read_rates(passes=2)))
        rows[context] = _speed_row(context, models, runs, timings, config)
    return tuple(rows[context] for context in config.contexts)


def _speed_row(
    context: int,
    models: Sequence[LoadedModel],
    runs: Sequence[FormatRuns],
    timings: dict[int, Timing],
    config: ReportConfig,
) -> SpeedRow:
    read = [
        StepBytes(weights_read(model), cache_read(of_model.plan, context, config.new_tokens)).total
        for model, of_model in zip(models, runs, strict=True)
    ]
    speeds = [config.new_tokens / timings[index].seconds for index in (0, 1)]
    return SpeedRow(
        context=context,
        source_tokens_per_s=speeds[0],
        converted_tokens_per_s=speeds[1],
        ratio=speeds[1] / speeds[0],
        bytes_ratio=read[0] / read[1],
        is_steady=all(timing.is_steady for timing in timings.values()),
    )
