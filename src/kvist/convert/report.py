"""A converted model beside its source: how it predicts, what its cache takes, how fast it decodes."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from kvist.bench.format_runs import FormatRuns, Workload
from kvist.bench.machine import MachineFacts
from kvist.bench.memory import resident_bytes
from kvist.bench.probed import Timing, time_in_turn
from kvist.bench.prompts import Prompts
from kvist.bench.step_bytes import StepBytes, cache_read, weights_read
from kvist.convert.bigram import LEAST_TOKENS, BigramModel
from kvist.convert.record import ConversionRecord
from kvist.convert.report_config import ReportConfig
from kvist.convert.report_rows import CacheRow, ConversionReport, Prediction, SpeedRow
from kvist.convert.uptrain_curve import read_curve
from kvist.convert.uptrain_text import joined_tokens
from kvist.errors import ModelNotFoundError, OptionError, PromptError
from kvist.evaluate.evaluation import evaluate
from kvist.evaluate.text_windows import EvaluationText, text_windows
from kvist.kernels import native
from kvist.loading import LoadedModel, load
from kvist.loading.progress import Progress, no_progress


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
        ModelFileError: what the converted model's folder says of its making is damaged.
        KvistError: a model cannot be loaded, or a text or a context does not fit it.
    """
    if not directory.is_dir():
        raise ModelNotFoundError(f"there is no folder {directory}: give one that `kvist convert gqa` made")
    record, curve = ConversionRecord.read(directory), read_curve(directory)  # before the minutes of all else
    predictions, positions, before, after = _predictions(source, directory, text, config, bigram_text, progress)
    is_source = record.is_made_from(before.files_hash)
    gc.collect()  # the fp32 weights: what is timed should have the memory to itself
    cache, speeds = _measured(source, directory, text, config, progress)
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
        record=record,
        is_source=is_source,
        curve=curve,
        machine=MachineFacts.gather(torch.get_num_threads()).line,
    )


@dataclass(frozen=True)
class _Heads:
    name: str
    files_hash: str
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
    bigram = None if bigram_text is None else _bigram(before, bigram_text)
    found = None
    for found in evaluate(before.decoder, after.decoder, windows, asked):
        progress("predicting the text", found.windows, len(windows))
    assert found is not None
    (row,) = found.rows
    predictions = [
        Prediction(before.name, math.log(found.reference_perplexity), found.reference_perplexity),
        Prediction(after.name, math.log(row.perplexity), row.perplexity, row.kl_mean, row.top1_agreement),
    ]
    if bigram_text is not None and bigram is not None:
        loss = bigram.loss(torch.tensor(windows))
        predictions.append(Prediction.of_loss(f"bigram model of {bigram_text.name}", loss))
    predictions.append(Prediction.of_loss("uniform guessing", math.log(before.config.vocab_size)))
    heads = [
        _Heads(model.name, model.files_hash.get(progress), model.config.num_heads, model.config.num_kv_heads)
        for model in (before, after)
    ]
    return tuple(predictions), found.positions, heads[0], heads[1]


def _check_same_vocabulary(before: LoadedModel, after: LoadedModel, text: EvaluationText) -> None:
    if before.config.vocab_size != after.config.vocab_size or (
        before.tokenizer.encode(text.text) != after.tokenizer.encode(text.text)
    ):
        raise OptionError(
            f"{before.name} has another vocabulary than {after.name}: give the model that it was converted from"
        )


def _bigram(model: LoadedModel, text: EvaluationText) -> BigramModel:
    vocab_size = model.config.vocab_size
    try:
        token_ids = joined_tokens(model.tokenizer, [text], vocab_size)
    except PromptError as error:
        raise PromptError(f"the text {text.name}: {error}") from None
    if len(token_ids) < LEAST_TOKENS:
        tokens = f"{len(token_ids)} token{'s' * (len(token_ids) != 1)}"
        raise PromptError(f"the text {text.name} has {tokens}, too few for a bigram model: give a longer one")
    return BigramModel(torch.tensor(token_ids), vocab_size)


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
