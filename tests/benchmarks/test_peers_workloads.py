from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from peers_fakes import GB, FakeWorker, fake_field
from turns import Limits
from workloads import Plan, Row, Text, Workloads

from kvist.bench.rates import request_lengths

BEGIN = [7]
# As long as the text that is measured with; each token is there once.
TOKEN_IDS = list(range(100, 38_100))
LIMITS = Limits(3, 1000.0)


def plan(**changes: Any) -> Plan:
    return Plan(**{"contexts": (128, 1024, 7000), **dict.fromkeys(WORKS, LIMITS), **changes})


WORKS = ("decode", "prefill", "batch", "requests")


def measured(monkeypatch: pytest.MonkeyPatch, plan: Plan, *workers: FakeWorker, **field: Any) -> list[Row]:
    """All rows, over a text without repetitions."""
    with fake_field(monkeypatch, dict(zip("abc", workers, strict=False)), **field) as contenders:
        return list(Workloads(contenders, Text(BEGIN, TOKEN_IDS), plan, lambda: 40 * GB).rows())


def prompts_of(worker: FakeWorker) -> list[list[int]]:
    """All that it computed as a sequence of its own."""
    found: list[list[int]] = [[]]
    for command, arguments in worker.asked:
        if command == "reset":
            found.append([])
        elif command == "extend":
            found[-1] = found[-1] + arguments["token_ids"]
        elif command in ("fill", "answer"):
            found += arguments["prompts"]
    return found


def test_no_engine_has_seen_the_beginning_of_a_prompt_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines keep blocks of at least 16 tokens by what stands before them."""
    worker = FakeWorker()
    measured(monkeypatch, plan(), worker)
    prompts = [prompt for prompt in prompts_of(worker) if prompt]
    assert len(prompts) == 1 + 2 * 3 + 8 + 32 + 3 * 32
    beginnings = [tuple(prompt[: len(BEGIN) + 16]) for prompt in prompts]
    assert all(beginning[: len(BEGIN)] == tuple(BEGIN) for beginning in beginnings)
    assert len(set(beginnings)) == len(beginnings)


def test_all_contenders_compute_the_same_in_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = FakeWorker(), FakeWorker()
    measured(monkeypatch, plan(), one, other)
    assert len(one.asked) > 30
    assert one.asked[1:] == other.asked[1:]  # but for the loading


def test_the_prompt_grows_from_context_to_context(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = FakeWorker()
    measured(monkeypatch, plan(contexts=(128, 1024)), worker)
    commands = [command for command, _ in worker.asked]
    assert commands[:3] == ["load", "extend", "decode"]
    first, second = worker.of("extend")[:2]
    assert (len(first["token_ids"]), len(second["token_ids"])) == (128, 1024 - 128)
    assert [token for part in (first, second) for token in part["token_ids"]] == BEGIN + TOKEN_IDS[:1023]


def test_there_are_batches_of_8_and_of_32_and_32_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = FakeWorker({"decode_batch": 2.0, "answer": 10.0})
    rows = measured(monkeypatch, plan(), worker)
    filled = [list(map(len, asked["prompts"])) for asked in worker.of("fill") if asked["prompts"]]
    assert filled == [[1000] * 8, [1000] * 32]
    assert all(list(map(len, asked["prompts"])) == request_lengths(32) for asked in worker.of("answer"))
    batches = [(row.sequences, row.context, row.figure.tokens_per_s) for row in rows if row.work == "batch"]
    assert batches == [(8, 1000, 8 * 32 / 2.0), (32, 1000, 32 * 32 / 2.0)]
    (requests,) = [row for row in rows if row.work == "requests"]
    assert (requests.context, requests.sequences, requests.figure.seconds) == (28_306, 32, 10.0)
    assert requests.figure.rounds == 3
    assert requests.figure.tokens_per_s == (28_306 + 32 * 64) / 10


def test_figures_are_tokens_over_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = measured(monkeypatch, plan(contexts=(128, 1024)), FakeWorker({"extend": 0.25, "decode": 0.5}))
    rates = {(row.work, row.context): row.figure.tokens_per_s for row in rows if row.work in ("decode", "prefill")}
    assert rates == {("decode", 128): 64.0, ("decode", 1024): 64.0, ("prefill", 1024): 4096.0}


def test_a_prompt_that_takes_too_long_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = FakeWorker({"extend": 5.0})
    rows = measured(monkeypatch, plan(prefill=Limits(3, 12.0)), worker)
    prefills = {
        row.context: (row.in_parts, row.figure.rounds, row.figure.seconds) for row in rows if row.work == "prefill"
    }
    assert prefills == {1024: (False, 3, 5.0), 7000: (True, 1, 15.0)}


def test_caches_that_are_not_for_batches_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = FakeWorker()
    rows = measured(monkeypatch, plan(), worker, in_batches=False)
    assert {row.work for row in rows} == {"decode", "prefill"}
    assert worker.of("fill") == worker.of("answer") == []


def test_one_that_fails_in_batches_keeps_its_other_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    bad, good = FakeWorker(fails_at={"fill": "out of memory"}), FakeWorker()
    rows = measured(monkeypatch, plan(), bad, good)
    assert {row.work for row in rows if row.label == "fake a"} == {"decode", "prefill"}
    assert {row.work for row in rows if row.label == "fake b"} == set(WORKS)


def test_a_text_gives_prompts_one_behind_the_other() -> None:
    text = Text(BEGIN, TOKEN_IDS)
    prompts = text.prompts([100, 50, 200])
    assert list(map(len, prompts)) == [100, 50, 200]
    for before, after in pairwise(prompts):
        assert after[1] == before[-1] + 1


def test_a_text_that_repeats_itself_gives_no_beginning_twice() -> None:
    text = Text([], [*range(37), *range(37), *range(50, 100)])
    first, second = text.prompt(20), text.prompt(20)
    assert (first[0], second[0]) == (0, 50)


def test_a_text_that_is_too_short_is_an_error() -> None:
    text = Text(BEGIN, TOKEN_IDS[:50])
    text.prompt(51)
    with pytest.raises(ValueError, match="50 tokens: too few for 50 that begin as none before"):
        text.prompt(51)
