"""Timing contenders in turn, A B A B, each beside the bandwidth of the moment."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from field import Contender, Field
from worker import WorkerError

from kvist.bench.probed import MOST_DRIFT, Repetition

# So many times as often as asked may be tried where the bandwidth moves.
_MOST_TRIES = 3


@dataclass(frozen=True)
class Limits:
    """How often something is measured.

    Attributes:
        rounds: that are to count.
        seconds: once a contender has taken so long, it has no more turns; it has one in any case.
    """

    rounds: int
    seconds: float


@dataclass(frozen=True)
class Figure:
    """What the repetitions of one contender came to.

    Attributes:
        tokens_per_s: the median.
        seconds: the median.
        spread: from the slowest to the fastest, as a part of the median.
        gb_per_s: the median of the read bandwidth around them.
        rounds: that count.
        discarded: that do not, since the bandwidth moved.
        is_steady: whether those that count held to 10 %. Where none did, the quietest one counts.
    """

    tokens_per_s: float
    seconds: float
    spread: float
    gb_per_s: float
    rounds: int
    discarded: int
    is_steady: bool

    @classmethod
    def of(cls, found: list[Repetition], num_tokens: int) -> Figure:
        """From at least one repetition of a task of so many tokens."""
        steady = [repetition for repetition in found if repetition.drift <= MOST_DRIFT]
        counted = steady or [min(found, key=lambda repetition: repetition.drift)]
        seconds = [repetition.seconds for repetition in counted]
        median = statistics.median(seconds)
        return cls(
            tokens_per_s=num_tokens / median,
            seconds=median,
            spread=(max(seconds) - min(seconds)) / median,
            gb_per_s=statistics.median(repetition.bytes_per_s for repetition in counted) / 1e9,
            rounds=len(counted),
            discarded=len(found) - len(counted),
            is_steady=bool(steady),
        )


class Probe:
    """The read bandwidth between two measurements: taken once, it is the end of one and the beginning of the next."""

    def __init__(self, bandwidth: Callable[[], float]) -> None:
        self._bandwidth = bandwidth
        self._last = bandwidth()

    def refresh(self) -> None:
        """Read again, where something that is not measured came between."""
        self._last = self._bandwidth()

    def around(self, seconds: Callable[[], float]) -> Repetition:
        """Call what measures, and gives its seconds."""
        before, taken = self._last, seconds()
        self._last = after = self._bandwidth()
        return Repetition(taken, (before + after) / 2, abs(before - after) / max(before, after))


def in_turn(
    field: Field, contenders: list[Contender], task: Callable[[Contender, int], float], limits: Limits, probe: Probe
) -> dict[str, list[Repetition]]:
    """Give each contender its turns. One that fails leaves the field.

    Args:
        field: all that have not failed.
        contenders: of these, those to measure.
        task: measures one of them, the how-manyth time counted from 0; its seconds.
        limits: how often.
        probe: the bandwidth.

    Returns:
        By label, the repetitions of those that had any.
    """
    found: dict[str, list[Repetition]] = {one.label: [] for one in contenders}
    for turn in range(_MOST_TRIES * limits.rounds):
        waiting = [one for one in contenders if one in field.live and not _is_through(found[one.label], limits)]
        if not waiting:
            break
        probe.refresh()
        for one in waiting:
            try:
                found[one.label].append(probe.around(partial(task, one, turn)))
            except WorkerError as error:
                field.drop(one, str(error))
                probe.refresh()
    return {label: repetitions for label, repetitions in found.items() if repetitions}


def _is_through(found: list[Repetition], limits: Limits) -> bool:
    steady = sum(repetition.drift <= MOST_DRIFT for repetition in found)
    return steady >= limits.rounds or (
        bool(found) and sum(repetition.seconds for repetition in found) >= limits.seconds
    )
