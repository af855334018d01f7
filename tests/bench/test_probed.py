from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvist.bench.probed import Measured, time_in_turn


def steadily(*values: float) -> Iterator[float]:
    yield from values
    while True:
        yield values[-1]


def test_tasks_take_turns_after_a_run_that_does_not_count() -> None:
    ran: list[str] = []
    tasks = {name: (lambda name=name: ran.append(name)) for name in "ab"}
    timings = time_in_turn(tasks, 3, lambda: 1e9)
    assert ran == list("ab" * 4)
    for timing in timings.values():
        assert (timing.repetitions, timing.discarded, timing.is_steady, timing.bytes_per_s) == (3, 0, True, 1e9)
        assert timing.seconds > 0


def test_a_repetition_around_which_the_bandwidth_moved_is_taken_again() -> None:
    bandwidths = steadily(100, 50, 50, 54, 54)  # twice as fast before the first; 8 % around the third
    timing = time_in_turn({"a": lambda: None}, 3, lambda: next(bandwidths))["a"]
    assert (timing.repetitions, timing.discarded, timing.is_steady) == (3, 1, True)
    assert timing.bytes_per_s == pytest.approx(52)


def test_a_bandwidth_that_never_rests_is_told() -> None:
    bandwidths = iter([10.0**i for i in range(100)])
    turns: list[tuple[int, int]] = []
    timings = time_in_turn({"a": lambda: None}, 2, lambda: next(bandwidths), done=lambda *turn: turns.append(turn))
    assert (timings["a"].repetitions, timings["a"].discarded, timings["a"].is_steady) == (2, 6, False)
    assert turns == [(i, 8) for i in range(1, 9)]


def test_a_task_may_say_itself_how_long_it_took() -> None:
    times = iter([9.0, 1.0, 2.0, 4.0])
    timing = time_in_turn({"a": lambda: Measured(next(times))}, 3, lambda: 1e9)["a"]
    assert (timing.seconds, timing.spread_fraction) == (2.0, 1.5)


def test_without_a_warm_up_the_first_run_counts() -> None:
    times = iter([9.0])
    assert time_in_turn({1: lambda: Measured(next(times))}, 1, lambda: 1e9, warm_up=False)[1].seconds == 9.0
