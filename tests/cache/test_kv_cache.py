"""The cache's surface: writing and reading, room, steps that are refused, interrupts."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable

import pytest
import torch
from kv_cache_cases import (
    AROUND_A_PAGE,
    EXACT,
    FULL,
    MAX_STEP,
    SLACK,
    WINDOWED,
    append,
    cache_of,
    filled,
    holds,
    keys_of,
)

from cache_checks import bytes_in_use, check_books, committed_bytes
from kvist.cache import page_pool
from kvist.cache.kv_cache import KVCache, Span
from kvist.cache.page_layout import PAGE_SLOTS
from kvist.cache.plan import CachePlan
from kvist.config import CacheConfig, LayerConfig
from kvist.errors import KvistError, OptionError, ReservationError, SequenceError
from kvist.kv_format import LayerFormats

# --- writing and reading ----------------------------------------------------------------------------------------------


def test_bytes_per_token_are_those_of_its_slots_in_all_layers() -> None:
    assert CachePlan((FULL, FULL), EXACT, 0, 1).bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert CachePlan((FULL, FULL), LayerFormats.parse("bf16"), 0, 1).bytes_per_token == 2 * 2 * 2 * 16 * 2
    assert cache_of(64).bytes_per_token == 512


@pytest.mark.parametrize("length", AROUND_A_PAGE)
@pytest.mark.parametrize("chunk", [1, 7, 63, 64, 65, 200])
def test_what_is_written_in_chunks_is_read_whole(length: int, chunk: int) -> None:
    cache = cache_of(200, sequences=2)
    one, other = cache.open(), cache.open()
    for start in range(0, length, chunk):
        tokens = range(start, min(length, start + chunk))
        for sequence, offset in ((one, 0), (other, 1000)):
            assert cache.reserve(sequence, start + len(tokens))
            append(cache, sequence, *(token + offset for token in tokens))
    assert holds(cache, one, *range(length))
    assert holds(cache, other, *range(1000, 1000 + length))
    check_books(cache)


def test_a_step_packs_the_spans_of_its_sequences() -> None:
    cache = cache_of(200, sequences=2)
    one, other = filled(cache, 62, 80), filled(cache, 5, 80)
    view = cache.view([Span(other, 3), Span(one, 4)])
    assert view.positions().tolist() == [5, 6, 7, 62, 63, 64, 65]
    assert (view.num_tokens, view.row_starts, view.first_positions) == (7, (0, 3), (5, 62))
    for layer in range(2):
        keys = keys_of(cache, layer, torch.tensor([5, 6, 7, 62, 63, 64, 65]))
        view.write(layer, keys, -keys)
    cache.commit(view)
    assert holds(cache, one, *range(66))
    assert holds(cache, other, *range(8))


def test_a_split_is_read_with_zeros_beyond_the_end() -> None:
    cache = cache_of(300)
    sequence = filled(cache, 130)
    view = cache.view([Span(sequence, 0)])
    for start, stop in ((0, 256), (64, 130), (128, 192), (128, 129), (192, 256), (640, 700), (0, 0)):
        keys, values = view.read_split(1, 0, start, stop)
        expected = torch.zeros(stop - start, 2, 16)
        there = keys_of(cache, 1, torch.arange(start, max(start, min(stop, 130))))
        expected[: len(there)] = there
        assert torch.equal(keys, expected.transpose(0, 1))
        assert torch.equal(values, -expected.transpose(0, 1))
    with pytest.raises(ValueError, match="start is 63: it must be a multiple of 64"):
        view.read_split(0, 0, 63, 64)


def test_a_step_that_is_not_committed_leaves_the_sequence_as_it_was() -> None:
    cache = cache_of(200)
    sequence = filled(cache, 60, 200)
    append(cache, sequence, *range(900, 1000), commits=False)
    assert holds(cache, sequence, *range(60))
    append(cache, sequence, 60, 61)
    assert holds(cache, sequence, *range(62))
    check_books(cache)


@pytest.mark.parametrize("strange", [torch.nan, torch.inf, -torch.inf])
def test_what_a_slot_held_before_does_not_leak(strange: float) -> None:
    cache = cache_of(200)
    poisoned = filled(cache, 10, 200)
    view = cache.view([Span(poisoned, 150)])
    for layer in range(2):
        view.write(layer, torch.full((150, 2, 16), strange), torch.full((150, 2, 16), strange))
    for tensor in cache.view([Span(poisoned, 0)]).read_split(0, 0, 0, 256):
        assert tensor.isfinite().all()  # in the same page, beyond the length
    cache.commit(view)
    cache.rewind(poisoned, 5)
    for tensor in cache.view([Span(poisoned, 0)]).read_split(0, 0, 0, 256):
        assert tensor.isfinite().all()
    cache.release(poisoned)
    clean = filled(cache, 3)
    for group in cache.groups:
        assert group.pool.owners(0) == 1
    for tensor in cache.view([Span(clean, 0)]).read_split(0, 0, 0, 256):
        assert tensor.isfinite().all()
    assert cache.groups[0].pool.pages[0].view(torch.float32).isfinite().all()


# --- the budget -------------------------------------------------------------------------------------------------------


def test_the_budget_bounds_all_sequences_together() -> None:
    cache = cache_of(640)
    one, other = cache.open(), cache.open()
    assert cache.reserve(one, 384)
    assert cache.used_bytes == cache.bytes_for(384)
    assert not cache.reserve(other, 257)
    assert cache.used_bytes == cache.bytes_for(384)
    assert cache.reserve(other, 256)
    assert not cache.reserve(one, 385)
    cache.release(other)
    assert cache.reserve(one, 640)
    cache.release(one)
    assert cache.used_bytes == 0


def test_what_is_reserved_costs_the_same_before_and_after_it_is_used() -> None:
    cache = cache_of(500, (FULL, WINDOWED))
    sequence = cache.open()
    assert cache.reserve(sequence, 500)
    assert (cache.used_bytes, bytes_in_use(cache)) == (cache.bytes_for(500), 0)
    append(cache, sequence, *range(65))
    assert cache.used_bytes == cache.bytes_for(500)
    assert bytes_in_use(cache) == cache.sequence_bytes(sequence) == cache.bytes_for(65)
    cache.unreserve(sequence)
    assert cache.used_bytes == bytes_in_use(cache) == cache.bytes_for(65)
    with pytest.raises(ReservationError, match="no room reserved"):
        append(cache, sequence, 1)


@pytest.mark.parametrize("layers", [(FULL,), (FULL, WINDOWED), (WINDOWED, FULL, LayerConfig(1, 16, 7))])
def test_the_most_tokens_that_fit_can_be_reserved_and_no_more(layers: tuple[LayerConfig, ...]) -> None:
    for num_tokens in (64, 640, 6400):
        cache = cache_of(num_tokens, layers)
        assert cache.max_tokens == num_tokens
        sequence = cache.open()
        assert not cache.reserve(sequence, num_tokens + 1)
        assert cache.reserve(sequence, num_tokens)


def test_windows_alone_have_no_end() -> None:
    roomy = cache_of(10_000, (WINDOWED,))
    assert roomy.max_tokens == sys.maxsize
    sequence = roomy.open()
    assert roomy.reserve(sequence, 10**15)
    tight = KVCache((WINDOWED,), CacheConfig(EXACT, roomy.config.memory_bytes - 1, SLACK, MAX_STEP))
    assert tight.max_tokens == (roomy.config.memory_bytes // tight.bytes_for(1) - 1) * PAGE_SLOTS


def test_a_budget_below_a_page_of_each_group_is_refused_with_the_least() -> None:
    layers = (FULL, WINDOWED, LayerConfig(1, 16, 7))
    least = cache_of(1, layers).config.memory_bytes
    with pytest.raises(OptionError, match=rf"kv_memory is .* at least .* \({least:,} bytes\), .* 3 layer groups"):
        KVCache(layers, CacheConfig(EXACT, least - 1))
    cache = KVCache(layers, CacheConfig(EXACT, least))
    assert holds(cache, filled(cache, 64), *range(64))
    assert cache.max_tokens == 64


def test_what_the_account_says_is_what_the_system_has_given() -> None:
    cache = KVCache(
        [LayerConfig(3, 64, None), *[LayerConfig(1, 256, 512)] * 3], CacheConfig(LayerFormats.parse("bf16"), 2**26)
    )

    def committed() -> int:
        return sum(committed_bytes(group.pool) or 0 for group in cache.groups)

    if committed_bytes(cache.groups[0].pool) is None:
        pytest.skip("this system does not say which memory is committed")
    sequence = cache.open()
    assert cache.reserve(sequence, 3000)
    assert committed() == bytes_in_use(cache) == 0
    for count in (1, 1000, 63, 64, 65, 1500):
        append(cache, sequence, *range(count))
        assert committed() == bytes_in_use(cache) > 0
    fork = cache.fork(sequence)
    assert cache.reserve(fork, 3000)
    append(cache, fork, 1, 2, 3)
    assert committed() == bytes_in_use(cache)
    cache.rewind(fork, 2690)
    cache.release(sequence)
    assert committed() == bytes_in_use(cache)
    cache.release(fork)
    assert committed() == bytes_in_use(cache) == 0


# --- steps that are refused -------------------------------------------------------------------------------------------


def test_a_step_without_room_for_all_is_refused_whole() -> None:
    cache = cache_of(128, sequences=2)
    one, other = filled(cache, 10, 100), filled(cache, 10)
    before = bytes_in_use(cache)
    with pytest.raises(
        ReservationError, match=f"sequence {other}: no room reserved for 1 more tokens: it has 10 and has reserved 10"
    ):
        cache.view([Span(one, 90), Span(other, 1)])
    assert bytes_in_use(cache) == before
    with pytest.raises(SequenceError, match="not open"):
        cache.view([Span(one, 90), Span(99, 1)])
    assert bytes_in_use(cache) == before
    check_books(cache)


def test_a_step_takes_max_step_tokens_of_a_sequence_at_most() -> None:
    cache = cache_of(1000)
    sequence = cache.open()
    assert cache.reserve(sequence, 1000)
    with pytest.raises(
        ReservationError, match="257 tokens in one step, and a step takes max_step_tokens, 256, at most"
    ):
        cache.view([Span(sequence, 257)])
    append(cache, sequence, *range(256))
    assert holds(cache, sequence, *range(256))


def test_misuse_has_errors_of_its_own() -> None:
    cache = cache_of(100)
    sequence = filled(cache, 5, 10)
    with pytest.raises(SequenceError, match="twice in one step"):
        cache.view([Span(sequence, 1), Span(sequence, 1)])
    with pytest.raises(SequenceError, match="sequence 7 is not open in this cache: it was never opened"):
        cache.fork(7)
    view = cache.view([Span(sequence, 1)])
    cache.release(sequence)
    for act in (cache.fork, cache.release, cache.length, cache.unreserve, lambda i: cache.rewind(i, 0)):
        with pytest.raises(SequenceError, match=f"sequence {sequence} is not open in this cache: it was released"):
            act(sequence)
    keys = torch.zeros(1, 2, 16)
    stale = "was committed, rewound, unreserved or released, or another view of it was asked for, since this view was"
    with pytest.raises(SequenceError, match=f"sequence {sequence} {stale} made: ask for another"):
        view.write(0, keys, keys)
    assert issubclass(SequenceError, KvistError)
    assert cache.used_bytes == 0


@pytest.mark.parametrize("strange", [None, "a", [1], 0.0, True, float("nan")], ids=repr)
def test_what_is_no_sequence_is_told_in_one_line(strange: object) -> None:
    cache = cache_of(64)
    cache.open()
    for act in (cache.length, cache.release, lambda i: cache.reserve(i, 1), lambda i: cache.view([Span(i, 1)])):
        with pytest.raises(SequenceError, match=r" is no sequence of this cache: `open` gives their numbers$"):
            act(strange)
    with pytest.raises(SequenceError, match="sequence a number of thousands of digits is not open"):
        cache.length(10**5000)


def test_a_view_is_of_use_for_one_step_alone() -> None:
    cache = cache_of(200)
    sequence = filled(cache, 5, 200)
    keys = torch.zeros(100, 2, 16)
    for act in (
        cache.commit,
        lambda view: cache.rewind(sequence, 5),
        lambda view: cache.unreserve(sequence),
        lambda view: cache.view([Span(sequence, 1)]),
    ):
        cache.rewind(sequence, 5)
        assert cache.reserve(sequence, 200)
        view = cache.view([Span(sequence, 100)])
        view.write(0, keys, keys)
        act(view)
        with pytest.raises(SequenceError, match="ask for another"):
            view.write(0, keys, keys)
        with pytest.raises(SequenceError, match="ask for another"):
            cache.commit(view)


# --- interrupts -------------------------------------------------------------------------------------------------------


def test_an_interrupt_at_any_call_to_the_system_loses_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    interrupted_at = 0

    def interruptible(original: Callable[..., None]) -> Callable[..., None]:
        def call(*args: object) -> None:
            nonlocal calls
            original(*args)
            calls += 1
            if calls == interrupted_at:
                raise KeyboardInterrupt

        return call

    for owner, name in (
        (page_pool.ReservedRange, "commit"),
        (page_pool.ReservedRange, "decommit"),
        (page_pool.PagePool, "copy"),
    ):
        monkeypatch.setattr(owner, name, interruptible(getattr(owner, name)))
    finished = False
    while not finished:
        calls, interrupted_at = 0, interrupted_at + 1
        cache = cache_of(400, (FULL, WINDOWED), sequences=3)
        with contextlib.suppress(KeyboardInterrupt):
            origin = filled(cache, 250)
            fork = cache.fork(origin)
            assert cache.reserve(fork, 400)
            append(cache, fork, *range(100))
            cache.rewind(fork, 300)
            append(cache, fork, *range(100))
            cache.release(origin)
            cache.rewind(fork, 0)
            finished = True
        check_books(cache)
        for sequence in list(cache._sequences):
            cache.release(sequence)
        assert cache.used_bytes == 0
        check_books(cache)
    assert interrupted_at > 20


# --- other devices and systems ----------------------------------------------------------------------------------------


def test_where_no_range_can_be_reserved_the_pages_move_when_they_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_pool, "_storage", page_pool.GrowingTensor)
    cache = cache_of(1500, (FULL, WINDOWED), sequences=2)
    with torch.inference_mode():
        origin = filled(cache, 700)
    fork = cache.fork(origin)
    assert cache.reserve(fork, 1500)
    for start in range(700, 1500, 50):
        append(cache, fork, *range(start, start + 50))
    assert holds(cache, origin, *range(700))
    assert holds(cache, fork, *range(1500))
    check_books(cache)


# --- a cache for one run ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [1, 64, 65, 700])
def test_a_cache_for_a_run_takes_it_and_no_page_more(num_tokens: int) -> None:
    cache = KVCache.for_run((FULL, WINDOWED), EXACT, num_tokens, max_step_tokens=200)
    assert cache.config.memory_bytes == cache.bytes_for(num_tokens)
    assert (cache.config.rewind_slack_tokens, cache.config.max_step_tokens) == (0, 200)
    sequence = cache.open()
    assert cache.reserve(sequence, num_tokens)
    assert not cache.reserve(cache.open(), 1)
    for start in range(0, num_tokens, 200):
        append(cache, sequence, *range(start, min(num_tokens, start + 200)))
    assert holds(cache, sequence, *range(num_tokens))
