from __future__ import annotations

import random

import pytest

from engine_fakes import memory_for, tiny_config
from kvist.cache.kv_cache import KVCache, Span
from kvist.config import CacheConfig, EngineConfig, SamplingParams
from kvist.engine.sampler import Drawn, SamplingState
from kvist.engine.scheduler import Scheduler, common_prefix
from kvist.engine.sequence import Request, Room, Sequence
from kvist.engine.text import GeneratedText
from kvist.kv_format import LayerFormats


def cache_of(tokens: int) -> KVCache:
    return KVCache(tiny_config().layers, CacheConfig(LayerFormats.parse("bf16"), memory_for(tokens)))


def sequence_of(cache: KVCache, prompt: list[int], max_tokens: int, room: Room | None = None) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens)
    return Sequence(
        Request(prompt, params, requested_at=0.0),
        room=room or Room(cache.open(), kept=False),
        max_new_tokens=max_tokens,
        end_token_ids=frozenset(),
        sampling=SamplingState(params, prompt, 300),
        text=GeneratedText(lambda ids: "x" * len(ids), prompt, ()),
    )


@pytest.mark.parametrize("seed", range(30))
def test_every_token_is_computed_once_and_all_memory_comes_back(seed: int) -> None:
    """Random arrivals through a small cache: what each step takes on, in which order, and what is left at the end."""
    rng = random.Random(seed)
    cache = cache_of(256)
    config = EngineConfig(max_step_tokens=rng.choice([4, 16, 1000]), max_sequences=rng.choice([1, 3, 4]))
    scheduler = Scheduler(cache, config)
    computed: dict[Sequence, list[int]] = {}
    arrivals = [sequence_of(cache, [7] * rng.randrange(1, 60), rng.randrange(1, 40)) for _ in range(12)]
    waiting = list(arrivals)
    started: list[Sequence] = []
    while waiting or scheduler.sequences:
        while waiting and rng.random() < 0.5:
            scheduler.add(waiting.pop(0))
        plan = scheduler.plan()
        assert plan.refusals == ()
        assert plan.num_tokens <= config.max_step_tokens
        assert bool(plan.chunks) == bool(scheduler.sequences)
        running = [sequence for sequence in scheduler.sequences if sequence.started]
        assert len(running) <= config.max_sequences
        started += [sequence for sequence in running if sequence not in started]
        long_seen = False
        for chunk in plan.chunks:
            long_seen = long_seen or chunk.num_tokens > 1
            assert chunk.num_tokens > 1 or not long_seen or chunk is plan.chunks[-1]  # the last may be cut to one
            assert chunk.samples == (chunk.stop == len(chunk.sequence.token_ids))
            computed.setdefault(chunk.sequence, []).extend(range(chunk.start, chunk.stop))
        if plan.chunks:
            cache.commit(cache.view([Span(c.sequence.room.sequence_id, c.num_tokens) for c in plan.chunks]))
        for sequence in plan.sampling:
            if sequence.take(Drawn(7, None)):
                scheduler.remove(sequence)
                cache.release(sequence.room.sequence_id)
        assert cache.used_bytes <= cache.config.memory_bytes
    assert started == arrivals  # first come, first served
    for sequence in arrivals:
        assert computed[sequence] == list(range(len(sequence.token_ids) - 1))  # the last drawn is not computed
    assert cache.used_bytes == 0


def test_decoding_goes_before_prefill() -> None:
    cache = cache_of(128)
    scheduler = Scheduler(cache, EngineConfig(max_step_tokens=5, max_sequences=5))
    long, short = sequence_of(cache, [1] * 20, 4), sequence_of(cache, [2], 4)
    scheduler.add(long)
    scheduler.add(short)
    plan = scheduler.plan()
    assert [(c.sequence, c.start, c.stop, c.samples) for c in plan.chunks] == [
        (short, 0, 1, True),
        (long, 0, 4, False),
    ]
    assert plan.sampling == (short,)


def test_those_behind_one_that_does_not_fit_wait_with_it() -> None:
    cache = cache_of(128)
    scheduler = Scheduler(cache, EngineConfig())
    first, large, small = (sequence_of(cache, [1] * size, 10) for size in (50, 60, 5))  # pages: 1, 2, 1
    for sequence in (first, large, small):
        scheduler.add(sequence)
    assert [chunk.sequence for chunk in scheduler.plan().chunks] == [first]
    scheduler.remove(first)
    cache.release(first.room.sequence_id)
    assert [chunk.sequence for chunk in scheduler.plan().chunks] == [large]
    scheduler.remove(large)
    cache.release(large.room.sequence_id)
    assert [chunk.sequence for chunk in scheduler.plan().chunks] == [small]


def test_one_that_cannot_start_though_nothing_runs_is_refused_and_the_next_starts() -> None:
    cache = cache_of(192)
    assert cache.reserve(cache.open(), 70)  # an open session
    scheduler = Scheduler(cache, EngineConfig())
    large, small = sequence_of(cache, [1] * 60, 10), sequence_of(cache, [1] * 5, 10)
    scheduler.add(large)
    scheduler.add(small)
    plan = scheduler.plan()
    assert [refusal.sequence for refusal in plan.refusals] == [large]
    assert str(plan.refusals[0].error) == (
        "the request needs room for 70 tokens (16.0 KiB), but open sessions hold 16.0 KiB of the cache and leave "
        "8.0 KiB: close or reset a session, shorten the prompt, lower max_tokens or raise kv_memory"
    )
    assert [chunk.sequence for chunk in plan.chunks] == [small]


@pytest.mark.parametrize("method", ["reserve", "length"])
def test_an_error_in_planning_is_that_of_its_sequence(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    cache = cache_of(128)
    scheduler = Scheduler(cache, EngineConfig())
    bad, good = sequence_of(cache, [1] * 5, 10), sequence_of(cache, [1] * 5, 10)
    works = getattr(cache, method)

    def fails(sequence_id: int, *arguments: int, **named: int) -> object:
        if sequence_id == bad.room.sequence_id:
            raise ArithmeticError("a bug")
        return works(sequence_id, *arguments, **named)

    monkeypatch.setattr(cache, method, fails)
    scheduler.add(bad)
    scheduler.add(good)
    for _ in range(2):
        plan = scheduler.plan()
        assert [(refusal.sequence, str(refusal.error)) for refusal in plan.refusals] == [(bad, "a bug")]
        assert [chunk.sequence for chunk in plan.chunks] == [good]


def test_a_running_sequence_whose_plan_fails_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_of(128)
    scheduler = Scheduler(cache, EngineConfig())
    bad, good = sequence_of(cache, [1] * 5, 10), sequence_of(cache, [1] * 5, 10)
    scheduler.add(bad)
    scheduler.add(good)
    scheduler.plan()
    cache.release(bad.room.sequence_id)
    plan = scheduler.plan()
    assert [refusal.sequence for refusal in plan.refusals] == [bad]
    assert [chunk.sequence for chunk in plan.chunks] == [good]


def test_what_a_session_holds_itself_is_not_held_by_others() -> None:
    cache = cache_of(256)
    scheduler = Scheduler(cache, EngineConfig())
    room, other = Room(cache.open(), kept=True), cache.open()
    assert cache.reserve(room.sequence_id, 70)
    cache.commit(cache.view([Span(room.sequence_id, 70)]))
    cache.unreserve(room.sequence_id)
    assert cache.reserve(other, 20)
    scheduler.add(sequence_of(cache, [1] * 150, 90, room))
    (refusal,) = scheduler.plan().refusals
    assert "open sessions hold 8.0 KiB of the cache and leave 24.0 KiB" in str(refusal.error)


def test_a_room_keeps_what_its_next_sequence_begins_with() -> None:
    cache = cache_of(128)
    scheduler = Scheduler(cache, EngineConfig())
    room = Room(cache.open(), kept=True)
    first = sequence_of(cache, [1, 2, 3, 4, 5], 10, room)
    scheduler.add(first)
    cache.commit(cache.view([Span(room.sequence_id, scheduler.plan().num_tokens)]))
    scheduler.remove(first)

    second = sequence_of(cache, [1, 2, 3, 9, 9, 9], 10, room)
    scheduler.add(second)
    assert [(chunk.start, chunk.stop) for chunk in scheduler.plan().chunks] == [(3, 6)]
    assert (second.cached_tokens, cache.length(room.sequence_id), room.token_ids) == (3, 3, [1, 2, 3, 9, 9, 9])
    scheduler.remove(second)

    third = sequence_of(cache, [1, 2, 3], 10, room)  # all there: the last is computed for its logits
    scheduler.add(third)
    assert [(chunk.start, chunk.stop) for chunk in scheduler.plan().chunks] == [(2, 3)]
    assert third.cached_tokens == 2


def test_a_step_that_was_cut_off_after_its_commit_is_taken_again() -> None:
    cache = cache_of(128)
    scheduler = Scheduler(cache, EngineConfig())
    sequence = sequence_of(cache, [1, 2, 3], 10)
    scheduler.add(sequence)
    cache.commit(cache.view([Span(sequence.room.sequence_id, scheduler.plan().num_tokens)]))
    assert [(c.start, c.stop, c.samples) for c in scheduler.plan().chunks] == [(2, 3, True)]


@pytest.mark.parametrize(
    ("left", "right", "length"),
    [([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 2], 2), ([1, 2, 3], [1, 5, 3], 1), ([4], [5], 0)],
)
def test_common_prefix(left: list[int], right: list[int], length: int) -> None:
    assert common_prefix(left, right) == length
