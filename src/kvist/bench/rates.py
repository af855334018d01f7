"""Tokens per second of a model in several cache formats: decode, prefill, and many requests at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from kvist.bench.format_runs import FormatRuns
from kvist.bench.memory import MemoryFigures, peak_bytes_of
from kvist.bench.probed import Measured, Timing, time_in_turn
from kvist.bench.step_bytes import StepBytes, cache_read
from kvist.loading.progress import Progress

Bandwidth = Callable[[], float]
"""The read bandwidth of the moment, bytes per second."""


@dataclass(frozen=True, kw_only=True)
class _Row:
    """What every row says of its timing.

    Attributes:
        kv_format: its name.
        bandwidth_gb_per_s: read bandwidth around the repetitions.
        spread_fraction: of the repetitions that count.
        repetitions, discarded: that counted, and that did not since the bandwidth moved.
        is_steady: whether enough counted.
    """

    kv_format: str
    bandwidth_gb_per_s: float
    spread_fraction: float
    repetitions: int
    discarded: int
    is_steady: bool


@dataclass(frozen=True, kw_only=True)
class DecodeRow(_Row):
    """Sequences that decode together, in one format.

    Attributes:
        context: tokens of each sequence before those that were decoded.
        batch: sequences.
        tokens_per_s: of all of them together.
        ratio_to_one: over the tokens per second of one sequence; None where that was not measured.
        limit_tokens_per_s: what the bandwidth allows.
        weights_bytes, cache_bytes: that a step reads; the cache of all sequences.
        gb_per_s: that were read.
        roofline_fraction: of the read bandwidth.
    """

    context: int
    batch: int
    tokens_per_s: float
    ratio_to_one: float | None
    limit_tokens_per_s: float
    weights_bytes: int
    cache_bytes: int
    gb_per_s: float
    roofline_fraction: float


@dataclass(frozen=True, kw_only=True)
class PrefillRow(_Row):
    """Prompts that are computed from nothing, in one format.

    Attributes:
        context: tokens of the prompt.
        tokens_per_s: over the time to the first token.
        seconds: to the first token.
    """

    context: int
    tokens_per_s: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class RequestsRow(_Row):
    """Requests that come all at once, in one format.

    Attributes:
        seconds: until all had their answers.
        prompt_tokens, new_tokens: of all requests.
        tokens_per_s: both, over the seconds.
    """

    seconds: float
    prompt_tokens: int
    new_tokens: int
    tokens_per_s: float


def request_lengths(num_requests: int) -> list[int]:
    """Tokens of the prompts of requests that come at once: 200 to 1,499, always the same; of 32 requests 28,306."""
    import numpy as np

    return [int(length) for length in np.random.default_rng(0).integers(200, 1500, num_requests)]


def filled(
    runs: Mapping[str, FormatRuns],
    run: Callable[[FormatRuns], Measured],
    *,
    program_bytes: int,
    weights_bytes: int,
    progress: Progress,
) -> tuple[MemoryFigures, ...]:
    """Do in each format once what takes the most memory, before anything is timed.

    Args:
        runs: by the name of the format.
        run: what is done.
        program_bytes, weights_bytes: as in `MemoryFigures`.
        progress: told how many formats are through.
    """
    found, held = [], 0
    for done, (name, of_format) in enumerate(runs.items()):
        progress("computing prompts", done, len(runs))
        peak = peak_bytes_of(partial(run, of_format))
        found.append(MemoryFigures(name, program_bytes, weights_bytes, held + of_format.kv_bytes, peak))
        held += of_format.kv_bytes if of_format.workload.kept else 0
    progress("computing prompts", len(runs), len(runs))
    return tuple(found)


def decode_rows(
    runs: Mapping[str, FormatRuns],
    contexts: Sequence[int],
    batches: Sequence[int],
    weights_bytes: int,
    repetitions: int,
    bandwidth: Bandwidth,
    progress: Progress,
) -> list[DecodeRow]:
    """Time decode after each context, formats and batches in turn.

    The longest context comes first: the others are found in the cache.

    Args:
        runs: by the name of the format.
        contexts: tokens before those that are decoded.
        batches: how many sequences decode together.
        weights_bytes: that a step reads.
        repetitions: that are to count.
        bandwidth: measured around each.
        progress: told how many turns are through.

    Returns:
        A row for each context, format and batch, in the order asked for.
    """
    found: dict[int, list[DecodeRow]] = {}
    for context in sorted(contexts, reverse=True):
        tasks = {
            (name, batch): partial(of_format.decode, context, batch)
            for name, of_format in runs.items()
            for batch in batches
        }
        timings = time_in_turn(tasks, repetitions, bandwidth, done=_told(progress, f"{context:,} tokens"))
        rows = [
            _decode_row(runs[name], context, batch, weights_bytes, timing) for (name, batch), timing in timings.items()
        ]
        alone = {row.kv_format: row.tokens_per_s for row in rows if row.batch == 1}
        found[context] = [
            replace(row, ratio_to_one=row.tokens_per_s / alone[row.kv_format] if row.kv_format in alone else None)
            for row in rows
        ]
    return [row for context in contexts for row in found[context]]


def prefill_rows(
    runs: Mapping[str, FormatRuns],
    contexts: Sequence[int],
    repetitions: int,
    bandwidth: Bandwidth,
    progress: Progress,
) -> list[PrefillRow]:
    """Time prefill of prompts of each length, formats in turn, without a run before: `filled` was one.

    The arguments are those of `decode_rows`.
    """
    rows = []
    for context in contexts:
        tasks = {name: partial(of_format.prefill, context) for name, of_format in runs.items()}
        done = _told(progress, f"{context:,} tokens")
        timings = time_in_turn(tasks, repetitions, bandwidth, warm_up=False, done=done)
        rows += [
            PrefillRow(
                kv_format=name,
                context=context,
                tokens_per_s=context / timing.seconds,
                seconds=timing.seconds,
                **timing.fields(),
            )
            for name, timing in timings.items()
        ]
    return rows


def requests_rows(
    runs: Mapping[str, FormatRuns],
    lengths: Sequence[int],
    repetitions: int,
    bandwidth: Bandwidth,
    progress: Progress,
) -> list[RequestsRow]:
    """Time requests that come at once, formats in turn, without a run before: `filled` was one.

    Args:
        lengths: tokens of each prompt.
        runs, repetitions, bandwidth, progress: as in `decode_rows`.
    """
    tasks = {name: partial(of_format.answer, lengths) for name, of_format in runs.items()}
    done = _told(progress, f"{len(lengths)} requests")
    timings = time_in_turn(tasks, repetitions, bandwidth, warm_up=False, done=done)
    rows = []
    for name, timing in timings.items():
        prompt_tokens, new_tokens = sum(lengths), len(lengths) * (runs[name].new_tokens + 1)
        rows.append(
            RequestsRow(
                kv_format=name,
                seconds=timing.seconds,
                prompt_tokens=prompt_tokens,
                new_tokens=new_tokens,
                tokens_per_s=(prompt_tokens + new_tokens) / timing.seconds,
                **timing.fields(),
            )
        )
    return rows


def _decode_row(runs: FormatRuns, context: int, batch: int, weights_bytes: int, timing: Timing) -> DecodeRow:
    steps = runs.new_tokens
    read = StepBytes(weights_bytes, batch * cache_read(runs.plan, context, steps))
    steps_per_s = steps / timing.seconds
    return DecodeRow(
        kv_format=str(runs.kv_format),
        context=context,
        batch=batch,
        tokens_per_s=batch * steps_per_s,
        ratio_to_one=None,
        limit_tokens_per_s=batch * timing.bytes_per_s / read.total,
        weights_bytes=read.weights,
        cache_bytes=read.cache,
        gb_per_s=read.total * steps_per_s / 1e9,
        roofline_fraction=read.total * steps_per_s / timing.bytes_per_s,
        **timing.fields(),
    )


def _told(progress: Progress, stage: str) -> Callable[[int, int], None]:
    return lambda turn, turns: progress(f"measuring {stage}", turn, turns)
