"""Timing beside the bandwidth of the moment, which on a shared machine moves by a factor of two within a minute."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TypedDict, TypeVar

Name = TypeVar("Name", bound=Hashable)

# A repetition counts only where the bandwidth before and after it differ by no more than this part of the larger.
MOST_DRIFT = 0.1
# So many times as often as asked may be tried; then the quietest that there were count.
_MOST_TRIES = 4


@dataclass(frozen=True)
class Measured:
    """What a task returns that knows better than the clock around it which of its time counts.

    Attributes:
        seconds: those that count.
    """

    seconds: float


@dataclass(frozen=True)
class Repetition:
    """One timing.

    Attributes:
        seconds: that it took.
        bytes_per_s: the read bandwidth around it, the mean of before and after.
        drift: by which part of the larger the two differ.
    """

    seconds: float
    bytes_per_s: float
    drift: float


class TimingFields(TypedDict):
    """What a row says of its timing: the bandwidth in GB/s, and the other attributes of `Timing`."""

    bandwidth_gb_per_s: float
    spread_fraction: float
    repetitions: int
    discarded: int
    is_steady: bool


@dataclass(frozen=True)
class Timing:
    """What the repetitions of one task came to.

    Attributes:
        seconds: the median.
        bytes_per_s: the median of the read bandwidth around them.
        repetitions: that count.
        discarded: that did not, since the bandwidth moved.
        is_steady: whether all that count held to `MOST_DRIFT`.
        spread_fraction: how far the slowest and the fastest that count lie apart, as a fraction of the median.
    """

    seconds: float
    bytes_per_s: float
    repetitions: int
    discarded: int
    is_steady: bool
    spread_fraction: float

    def fields(self) -> TimingFields:
        """All but the seconds, for a row."""
        return {
            "bandwidth_gb_per_s": self.bytes_per_s / 1e9,
            "spread_fraction": self.spread_fraction,
            "repetitions": self.repetitions,
            "discarded": self.discarded,
            "is_steady": self.is_steady,
        }


def time_in_turn(
    tasks: Mapping[Name, Callable[[], object]],
    repetitions: int,
    bandwidth: Callable[[], float],
    *,
    warm_up: bool = True,
    done: Callable[[int, int], None] = lambda turn, turns: None,
) -> dict[Name, Timing]:
    """Time tasks in turn, A B A B, so that what the machine does meanwhile meets all alike.

    Args:
        tasks: by name. One that returns `Measured` says itself how long it took.
        repetitions: that are to count, of each.
        bandwidth: gives the read bandwidth of the moment, bytes per second.
        warm_up: whether to run each task once before, untimed.
        done: told how many of all turns are through; there may be fewer.
    """
    if warm_up:
        for task in tasks.values():
            task()
    found: dict[Name, list[Repetition]] = {name: [] for name in tasks}
    turns = _MOST_TRIES * repetitions
    before = bandwidth()
    for turn in range(turns):
        for name, task in tasks.items():
            if _steady(found[name]) >= repetitions:
                continue
            began_s = time.perf_counter()
            result = task()
            seconds = result.seconds if isinstance(result, Measured) else time.perf_counter() - began_s
            after = bandwidth()
            found[name].append(Repetition(seconds, (before + after) / 2, abs(before - after) / max(before, after)))
            before = after
        done(turn + 1, turns)
        if all(_steady(of_task) >= repetitions for of_task in found.values()):
            break
    return {name: _timing(of_task, repetitions) for name, of_task in found.items()}


def _steady(found: list[Repetition]) -> int:
    return sum(repetition.drift <= MOST_DRIFT for repetition in found)


def _timing(found: list[Repetition], repetitions: int) -> Timing:
    counted = sorted(found, key=lambda repetition: repetition.drift)[: max(1, repetitions)]
    if _steady(found) >= repetitions:
        counted = [repetition for repetition in found if repetition.drift <= MOST_DRIFT]
    seconds = [repetition.seconds for repetition in counted]
    return Timing(
        seconds=statistics.median(seconds),
        bytes_per_s=statistics.median(repetition.bytes_per_s for repetition in counted),
        repetitions=len(counted),
        discarded=len(found) - len(counted),
        is_steady=all(repetition.drift <= MOST_DRIFT for repetition in counted),
        spread_fraction=(max(seconds) - min(seconds)) / statistics.median(seconds),
    )
