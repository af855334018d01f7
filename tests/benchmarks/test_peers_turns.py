from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from field import Contender, Field
from peers_fakes import GB, FakeWorker, fake_field
from turns import Figure, Limits, Probe, in_turn
from worker import WorkerError

from kvist.bench.probed import Repetition

QUIET = 40 * GB


def probe(*rates: float) -> Probe:
    """A bandwidth that takes these values, and then the last for ever."""
    return Probe(then_always(rates))


def then_always(values: Iterable[float]) -> Callable[[], float]:
    left = list(values)
    return lambda: left.pop(0) if len(left) > 1 else left[0]


@pytest.fixture
def field(monkeypatch: pytest.MonkeyPatch) -> Field:
    return fake_field(monkeypatch, {"a": FakeWorker(), "b": FakeWorker()})


def test_contenders_take_turns(field: Field) -> None:
    order = []

    def task(one: Contender, turn: int) -> float:
        order.append((one.label, turn))
        return 1.0

    found = in_turn(field, list(field.live), task, Limits(3, 100.0), probe(QUIET))
    assert order == [(label, turn) for turn in range(3) for label in ("fake a", "fake b")]
    assert {label: len(repetitions) for label, repetitions in found.items()} == {"fake a": 3, "fake b": 3}


def test_one_that_has_taken_long_enough_has_no_more_turns(field: Field) -> None:
    seconds = {"fake a": 30.0, "fake b": 1.0}
    found = in_turn(field, list(field.live), lambda one, _: seconds[one.label], Limits(3, 30.0), probe(QUIET))
    assert {label: len(repetitions) for label, repetitions in found.items()} == {"fake a": 1, "fake b": 3}


def test_a_round_in_which_the_bandwidth_moved_is_repeated(field: Field) -> None:
    # The first two are for the making of the probe and the refresh before the first turn.
    moves = probe(QUIET, QUIET, QUIET / 2, QUIET)
    found = in_turn(field, field.live[:1], lambda *_: 1.0, Limits(2, 100.0), moves)["fake a"]
    assert [repetition.drift for repetition in found] == [0.5, 0.0, 0.0]
    assert [repetition.bytes_per_s for repetition in found] == [0.75 * QUIET, QUIET, QUIET]
    figure = Figure.of(found, num_tokens=10)
    assert (figure.rounds, figure.discarded, figure.is_steady, figure.gb_per_s) == (2, 1, True, 40.0)


def test_one_that_fails_leaves_the_field_and_the_others_go_on(field: Field, capsys: pytest.CaptureFixture) -> None:
    def task(one: Contender, turn: int) -> float:
        if one.label == "fake a" and turn == 1:
            raise WorkerError("out of memory")
        return 1.0

    worker = field.live[0].worker
    found = in_turn(field, list(field.live), task, Limits(3, 100.0), probe(QUIET))
    assert {label: len(repetitions) for label, repetitions in found.items()} == {"fake a": 1, "fake b": 3}
    assert [one.label for one in field.live] == ["fake b"]
    assert [(one.label, one.reason) for one in field.failures] == [("fake a", "out of memory")]
    assert worker.is_closed
    assert capsys.readouterr().out == "fake a: out of memory\n"


def test_a_figure_is_the_median_of_what_counts() -> None:
    found = [Repetition(seconds, QUIET, drift) for seconds, drift in ((2.0, 0.0), (4.0, 0.1), (3.0, 0.05), (9.0, 0.2))]
    figure = Figure.of(found, num_tokens=30)
    assert (figure.seconds, figure.tokens_per_s, figure.spread) == (3.0, 10.0, pytest.approx(2 / 3))
    assert (figure.rounds, figure.discarded, figure.is_steady) == (3, 1, True)


def test_where_none_was_steady_the_quietest_counts_and_is_marked() -> None:
    figure = Figure.of([Repetition(2.0, QUIET, 0.3), Repetition(4.0, QUIET, 0.2)], num_tokens=8)
    assert (figure.tokens_per_s, figure.rounds, figure.discarded, figure.is_steady) == (2.0, 1, 1, False)


def test_one_that_does_not_load_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = FakeWorker(fails_at={"load": "its process ended"})
    refuses, fine = FakeWorker(fails_at={"loaded": "no such cache"}), FakeWorker()
    with fake_field(monkeypatch, {"a": gone, "b": refuses, "c": fine}) as field:
        assert [one.label for one in field.live] == ["fake c"]
        assert [one.reason for one in field.failures] == ["its process ended", "no such cache"]
        assert fine.of("load")[0].keys() == {"model", "cache", "threads", "max_context", "work_folder"}
    assert all(worker.is_closed for worker in (gone, refuses, fine))
