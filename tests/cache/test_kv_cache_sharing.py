"""What sequences of a cache share and give back: forks, rewinding, windows."""

from __future__ import annotations

import pytest
import torch
from kv_cache_cases import (
    AROUND_A_PAGE,
    EXACT,
    FULL,
    MAX_STEP,
    SLACK,
    WINDOW,
    WINDOWED,
    append,
    cache_of,
    filled,
    held_from,
    holds,
)

from cache_checks import bytes_in_use, check_books, reserved_tokens
from kvist.cache.kv_cache import KVCache, Span
from kvist.cache.page_layout import PAGE_SLOTS
from kvist.cache.page_table import PageRules, pages_of
from kvist.config import CacheConfig
from kvist.errors import CacheFullError, RewindError
from kvist.kv_format import KV_FORMATS, KVFormat, LayerFormats

# --- forks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", AROUND_A_PAGE)
@pytest.mark.parametrize("fork_first", [True, False])
def test_a_fork_and_its_origin_go_their_own_ways(length: int, fork_first: bool) -> None:
    cache = cache_of(256, (FULL, WINDOWED, FULL), sequences=2)
    origin = filled(cache, length)
    fork = cache.fork(origin)
    assert bytes_in_use(cache) == cache.sequence_bytes(origin) == cache.sequence_bytes(fork)
    for sequence in (fork, origin) if fork_first else (origin, fork):
        assert cache.reserve(sequence, length + 70)
        append(cache, sequence, *(1000 * sequence + i for i in range(70)))
        check_books(cache)
    for sequence in (origin, fork):
        assert holds(cache, sequence, *range(length), *(1000 * sequence + i for i in range(70)))


@pytest.mark.parametrize("keys", KV_FORMATS)
@pytest.mark.parametrize("values", KV_FORMATS)
def test_a_fork_changes_no_bit_of_its_origin(keys: str, values: str) -> None:
    cache = cache_of(128, kv_format=LayerFormats(KVFormat(keys, values)), sequences=3)
    origin = filled(cache, 37)
    before = [cache.view([Span(origin, 0)]).read_split(layer, 0, 0, 64) for layer in range(2)]
    for sequence in (cache.fork(origin), origin, cache.fork(origin)):
        assert cache.reserve(sequence, 60)
        append(cache, sequence, *range(500, 500 + 60 - cache.length(sequence)))
        after = [cache.view([Span(origin, 0)]).read_split(layer, 0, 0, 64) for layer in range(2)]
        for layer in range(2):
            for one, other in zip(before[layer], after[layer], strict=True):
                assert torch.equal(one[:, :37], other[:, :37])


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_shared_pages_live_as_long_as_one_of_their_owners(order: tuple[int, ...]) -> None:
    cache = cache_of(200)
    origin = filled(cache, 150)
    family = [origin, cache.fork(origin)]
    family.append(cache.fork(family[1]))
    for number, index in enumerate(order):
        assert bytes_in_use(cache) == cache.bytes_for(150)
        cache.release(family[index])
        for left in order[number + 1 :]:
            assert holds(cache, family[left], *range(150))
        check_books(cache)
    assert cache.used_bytes == 0


def test_a_page_that_is_shared_no_more_is_not_copied() -> None:
    cache = cache_of(64)  # one page
    origin = filled(cache, 30)
    fork = cache.fork(origin)
    assert not cache.reserve(fork, 31)
    cache.release(origin)
    assert cache.reserve(fork, 31)
    append(cache, fork, 30)
    assert holds(cache, fork, *range(31))


def test_a_fork_of_a_sequence_that_may_grow_needs_a_page_for_the_copy() -> None:
    cache = cache_of(128)
    origin = filled(cache, 30, 100)
    before = cache.used_bytes
    with pytest.raises(
        CacheFullError, match=r"cannot fork sequence 0: .*takes 32,768 bytes more than the cache has free"
    ):
        cache.fork(origin)
    assert cache.used_bytes == before
    check_books(cache)
    cache.unreserve(origin)
    fork = cache.fork(origin)
    assert cache.reserve(origin, 64)
    assert not cache.reserve(fork, 31)
    append(cache, origin, 30)
    assert cache.reserve(fork, 64)  # the page is its own now
    assert holds(cache, origin, *range(31))
    assert holds(cache, fork, *range(30))


def test_a_fork_at_the_end_of_a_page_needs_no_copy() -> None:
    cache = cache_of(128)
    origin = filled(cache, 64, 100)
    fork = cache.fork(origin)
    append(cache, origin, 64)
    assert holds(cache, origin, *range(65))
    assert holds(cache, fork, *range(64))
    assert cache.used_bytes == cache.config.memory_bytes


# --- rewinding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("back", [0, 1, 63, 64, 65, 128, 130])
def test_what_is_rewound_can_be_written_anew(back: int) -> None:
    cache = cache_of(200)
    sequence = filled(cache, 130, 200)
    assert cache.rewind(sequence, 130 - back) == 130 - back
    assert holds(cache, sequence, *range(130 - back))
    assert (reserved_tokens(cache, sequence), cache.used_bytes) == (200, cache.bytes_for(200))
    append(cache, sequence, 7, 8, 9)
    assert holds(cache, sequence, *range(130 - back), 7, 8, 9)


def test_a_rewind_gives_memory_back() -> None:
    cache = cache_of(200)
    sequence = filled(cache, 130)
    cache.rewind(sequence, 64)
    assert cache.used_bytes == bytes_in_use(cache) == cache.bytes_for(64)


def test_a_rewind_goes_neither_before_the_start_nor_beyond_the_end() -> None:
    cache = cache_of(100)
    sequence = filled(cache, 6, 50)
    with pytest.raises(RewindError, match="cannot rewind to 7: the sequence holds 6 tokens"):
        cache.rewind(sequence, 7)
    with pytest.raises(RewindError, match="cannot rewind to -1: a sequence starts at 0"):
        cache.reserve(sequence, 50, rewind_to=-1)
    assert holds(cache, sequence, *range(6))


def test_a_rewind_into_shared_pages_leaves_the_other_sequence_alone() -> None:
    cache = cache_of(256, sequences=2)
    origin = filled(cache, 150)
    fork = cache.fork(origin)
    cache.rewind(fork, 70)
    assert cache.reserve(fork, 200)
    append(cache, fork, *range(1000, 1100))
    assert holds(cache, origin, *range(150))
    assert holds(cache, fork, *range(70), *range(1000, 1100))


def test_a_rewind_that_would_break_what_is_reserved_is_refused() -> None:
    cache = cache_of(128)
    origin = filled(cache, 64, 128)
    fork = cache.fork(origin)
    for position in (60, 0):
        with pytest.raises(CacheFullError, match=f"cannot rewind to {position} with room for 128 tokens reserved"):
            cache.rewind(origin, position)
        assert not cache.reserve(origin, 128, rewind_to=position)
    assert holds(cache, origin, *range(64))
    cache.unreserve(origin)
    assert cache.rewind(origin, 60) == 60
    assert holds(cache, fork, *range(64))
    check_books(cache)


def test_room_is_reserved_and_the_sequence_rewound_together_or_not_at_all() -> None:
    cache = cache_of(256)
    sequence = filled(cache, 150)
    other = filled(cache, 64)
    assert not cache.reserve(sequence, 193, rewind_to=10)
    assert holds(cache, sequence, *range(150))
    assert cache.reserve(sequence, 192, rewind_to=10)
    assert holds(cache, sequence, *range(10))
    assert holds(cache, other, *range(64))
    assert cache.used_bytes == cache.config.memory_bytes


def test_what_a_rewind_saves_the_others_is_counted() -> None:
    cache = cache_of(128)
    origin = filled(cache, 30)
    fork = cache.fork(origin)
    assert cache.reserve(fork, 64)  # its copy of the page that they share
    assert cache.used_bytes == cache.config.memory_bytes
    assert cache.reserve(origin, 64, rewind_to=0)  # the page is the fork's alone then, and needs no copy
    append(cache, fork, *range(30, 64))
    append(cache, origin, *range(64))
    assert holds(cache, fork, *range(64))
    assert holds(cache, origin, *range(64))


# --- windows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slack", [0, 1, 64, 65])
def test_pages_that_no_query_sees_are_dropped_behind_the_slack(slack: int) -> None:
    cache = cache_of(600, (FULL, WINDOWED), slack=slack)
    sequence = cache.open()
    assert cache.reserve(sequence, 600)
    for length in range(1, 601):
        append(cache, sequence, length)
        oldest = max(0, length - slack - WINDOW + 1)  # what the next query sees after rewinding by the slack
        if oldest % PAGE_SLOTS in (0, 1, PAGE_SLOTS - 1):
            assert held_from(cache, sequence, 1) == oldest // PAGE_SLOTS * PAGE_SLOTS
    assert cache.sequence_bytes(sequence) == bytes_in_use(cache)
    check_books(cache)


@pytest.mark.parametrize("step", [1, 63, 64, 65, MAX_STEP])
def test_a_window_has_a_bounded_number_of_pages(step: int) -> None:
    cache = cache_of(2000, (WINDOWED,))
    rules = cache.groups[0].rules
    sequence = cache.open()
    assert cache.reserve(sequence, 10**6)
    most = 0
    for start in range(0, 700, step):
        append(cache, sequence, *range(start, start + step), commits=False)
        most = max(most, cache.groups[0].pool.pages_in_use)
        append(cache, sequence, *range(start, start + step))
    assert most <= rules.most_live
    assert step < MAX_STEP or most >= rules.most_live - 1


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65])
@pytest.mark.parametrize("slack", [0, 1, 64])
@pytest.mark.parametrize("step", [1, 2, 63, 64, 200])
def test_the_most_pages_are_those_of_the_worst_length(window: int, slack: int, step: int) -> None:
    rules = PageRules(window, slack, step)
    worst = max(pages_of(length + step) - rules.first_needed(length) for length in range(1000))
    assert rules.most_live == worst


@pytest.mark.parametrize("length", [163, 164, 227, 228, 400])
def test_a_rewind_within_the_slack_keeps_what_the_next_query_sees(length: int) -> None:
    for back in (1, SLACK - 1, SLACK):
        cache = cache_of(length, (FULL, WINDOWED))
        sequence = filled(cache, length)
        position = length - back
        assert cache.rewind(sequence, position) == position
        assert held_from(cache, sequence, 1) <= max(0, position - WINDOW + 1)
        assert holds(cache, sequence, *range(position))


def test_a_rewind_beyond_the_slack_may_still_find_what_it_needs() -> None:
    """Pages are kept whole: the one with the slack's oldest token has some before it."""
    for position, kept in ((936, 936), (931, 931), (930, 0)):
        cache = cache_of(1000, (FULL, WINDOWED))
        assert cache.rewind(filled(cache, 1000), position) == kept


def test_a_rewind_beyond_what_a_window_holds_ends_at_the_start() -> None:
    cache = cache_of(400, (FULL, WINDOWED))
    sequence = filled(cache, 400)
    first = held_from(cache, sequence, 1)
    assert first > 0
    longest = first + WINDOW - 1
    assert cache.rewind(sequence, longest) == longest
    assert cache.rewind(sequence, longest - 1) == 0
    assert cache.used_bytes == 0
    assert cache.reserve(sequence, 3)
    append(cache, sequence, 5, 6, 7)
    assert holds(cache, sequence, 5, 6, 7)
    assert held_from(cache, sequence, 1) == 0


def test_a_window_shared_with_a_fork_keeps_its_promise() -> None:
    layers, tokens = (FULL, WINDOWED), 600
    roomy = cache_of(tokens, layers, sequences=2)
    shared_pages = 3
    memory_bytes = roomy.config.memory_bytes + shared_pages * roomy.groups[1].pool.stride
    cache = KVCache(layers, CacheConfig(EXACT, memory_bytes, SLACK, MAX_STEP))
    origin = filled(cache, 150)
    fork = cache.fork(origin)
    for sequence in (origin, fork):
        assert cache.reserve(sequence, tokens)
    assert cache.used_bytes <= memory_bytes
    for start in range(150, 600, 50):
        append(cache, origin, *range(start, start + 50))
        check_books(cache)
    assert holds(cache, origin, *range(600))
    assert held_from(cache, fork, 1) == 0
    for start in range(150, 600, 50):
        append(cache, fork, *range(start, start + 50))
        check_books(cache)
    assert holds(cache, fork, *range(600))
