"""The cache's surface: room, views, forks, rewinding, windows, the budget."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable

import pytest
import torch

from cache_checks import bytes_in_use, check_books, committed_bytes, reserved_tokens
from key_texts import identity_statics
from kvist.cache import kv_cache, page_pool
from kvist.cache.kv_cache import KVCache, Span
from kvist.cache.page_codec import PageCodec
from kvist.cache.page_layout import PAGE_SLOTS, PageLayout
from kvist.cache.page_table import PageRules, pages_of
from kvist.cache.plan import CachePlan
from kvist.config import CacheConfig, LayerConfig
from kvist.errors import CacheFullError, KvistError, OptionError, ReservationError, RewindError, SequenceError
from kvist.kernels.key_statics import KeyStatics
from kvist.kv_format import KV_FORMATS, KVFormat, LayerFormats

FULL = LayerConfig(2, 16, None)
WINDOW = 100
WINDOWED = LayerConfig(1, 32, WINDOW)
SLACK, MAX_STEP = 64, 256
EXACT = LayerFormats(KVFormat("fp32", "fp32"))
AROUND_A_PAGE = (1, 63, 64, 65, 127, 128, 129)


def cache_of(
    num_tokens: int,
    layers: tuple[LayerConfig, ...] = (FULL, FULL),
    *,
    kv_format: LayerFormats = EXACT,
    slack: int = SLACK,
    sequences: int = 1,
) -> KVCache:
    """A cache with room for some sequences of so many tokens each, and for no page more."""
    memory_bytes = sequences * CachePlan(layers, kv_format, slack, MAX_STEP).bytes_for(num_tokens)
    config = CacheConfig(kv_format, memory_bytes, slack, MAX_STEP)
    return KVCache(layers, config, key_statics=identity_statics(layers))


def keys_of(cache: KVCache, layer: int, tokens: torch.Tensor) -> torch.Tensor:
    """Keys `[T, K, D]` of a layer that follow from token numbers `[T]`; values are the negative."""
    shape = cache.layers[layer]
    dims = torch.arange(shape.num_kv_heads * shape.head_dim).view(shape.num_kv_heads, shape.head_dim)
    return tokens.view(-1, 1, 1) * 10.0 + dims + layer / 2


def append(cache: KVCache, sequence: int, *tokens: int, commits: bool = True) -> None:
    """A step that appends tokens, given by number."""
    view = cache.view([Span(sequence, len(tokens))])
    for layer in range(len(cache.layers)):
        keys = keys_of(cache, layer, torch.tensor(tokens))
        view.write(layer, keys, -keys)
    if commits:
        cache.commit(view)


def filled(cache: KVCache, num_tokens: int, reserved: int | None = None) -> int:
    """A new sequence of tokens 0, 1, 2, ..., with room for `reserved` in all."""
    sequence = cache.open()
    assert cache.reserve(sequence, reserved or num_tokens)
    for start in range(0, num_tokens, MAX_STEP):
        append(cache, sequence, *range(start, min(num_tokens, start + MAX_STEP)))
    return sequence


def read(cache: KVCache, sequence: int, layer: int = 0) -> torch.Tensor:
    """All keys `[L, K, D]` of a layer, checked against the values."""
    keys, values = cache.view([Span(sequence, 0)]).read_split(layer, 0, 0, cache.length(sequence))
    assert torch.equal(values, -keys)
    return keys.transpose(0, 1)


def holds(cache: KVCache, sequence: int, *tokens: int) -> bool:
    """Whether a sequence is exactly these tokens, in every layer without a window."""
    return cache.length(sequence) == len(tokens) and all(
        torch.equal(read(cache, sequence, layer), keys_of(cache, layer, torch.tensor(tokens)))
        for layer, shape in enumerate(cache.layers)
        if shape.window is None
    )


def held_from(cache: KVCache, sequence: int, layer: int) -> int:
    """The first position that a layer still has."""
    keys = read(cache, sequence, layer)
    return int((keys != 0).flatten(1).any(1).int().argmax())


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


# --- configuration ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory_bytes": 0}, "at least 1"),
        ({"rewind_slack_tokens": -1}, "rewind_slack_tokens is -1: it must be at least 0"),
        ({"max_step_tokens": 0}, "max_step_tokens is 0: it must be at least 1"),
    ],
)
def test_configurations_are_checked(changes: dict[str, int], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        CacheConfig(**{"kv_format": EXACT, "memory_bytes": 1, **changes})  # type: ignore[arg-type]


# --- statics ----------------------------------------------------------------------------------------------------------


def test_quantised_keys_without_statics_are_refused() -> None:
    def built(kv_format: str, statics: list[KeyStatics | None] | None) -> KVCache:
        return KVCache((FULL, WINDOWED), CacheConfig(LayerFormats.parse(kv_format), 2**20), key_statics=statics)

    first, second = identity_statics((FULL, WINDOWED))
    for kv_format in ("int8", "int4", "k=int8,v=fp32"):
        with pytest.raises(ValueError, match=r"layer 0 keeps its keys in int\d and has no statics"):
            built(kv_format, None)
        with pytest.raises(ValueError, match=r"layer 1 keeps its keys in int\d and has no statics"):
            built(kv_format, [first, None])
        built(kv_format, [first, second])
    with pytest.raises(ValueError, match="layer 1 keeps its keys in int4 and has no statics"):
        built("bf16/1:int4", [first, None])
    built("int4/1:bf16", [first, None])
    built("k=bf16,v=int4", None)
    with pytest.raises(ValueError, match="key_statics of 3 layers for 2"):
        built("int8", [first, second, second])


def test_statics_move_to_the_device_of_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: set[str] = set()

    def codec(layout: PageLayout, statics: list[KeyStatics]) -> PageCodec:
        devices.update(value.device.type for of_layer in statics for value in vars(of_layer).values())
        return PageCodec(layout)

    monkeypatch.setattr(kv_cache, "PageCodec", codec)
    config = CacheConfig(LayerFormats.parse("int8"), 2**20)
    KVCache((FULL, WINDOWED), config, "meta", key_statics=identity_statics((FULL, WINDOWED)))
    assert devices == {"meta"}


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((0, 16, None), "num_kv_heads is 0: it must be at least 1"),
        ((1, 0, None), "head_dim is 0: it must be at least 1"),
        ((1, 16, 0), "window is 0: it must be at least 1, or None to see all"),
    ],
)
def test_layers_are_checked(shape: tuple[int, int, int | None], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        LayerConfig(*shape)


def test_a_cache_has_layers() -> None:
    for build in (lambda: KVCache([], CacheConfig(EXACT, 1 << 20)), lambda: CachePlan([], EXACT, 0, 1)):
        with pytest.raises(OptionError, match="there are no layers: a cache needs one at least"):
            build()


# --- what is none of it -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1.5, float("nan"), float("inf"), -1, None, "7", True])
def test_numbers_of_tokens_are_integers(number: object) -> None:
    cache = cache_of(64)
    sequence = cache.open()
    for call in (cache.reserve, cache.rewind):
        with pytest.raises((OptionError, RewindError), match=r"it must be|cannot rewind to"):
            call(sequence, number)  # type: ignore[arg-type]
    assert cache.reserve(sequence, 64)
    with pytest.raises(OptionError, match=f"num_tokens of sequence {sequence} is"):
        cache.view([Span(sequence, number)])  # type: ignore[arg-type]
    assert (cache.length(sequence), reserved_tokens(cache, sequence)) == (0, 64)
    check_books(cache)


def test_a_view_is_committed_where_it_belongs() -> None:
    ours, theirs = cache_of(64), cache_of(64)
    sequence = ours.open()
    assert ours.reserve(sequence, 3)
    view = ours.view([Span(sequence, 3)])
    with pytest.raises(SequenceError, match="the view is of another cache"):
        theirs.commit(view)
    assert ours.length(sequence) == 0
    ours.commit(view)
    assert ours.length(sequence) == 3


def test_keys_and_values_have_the_shape_of_their_layer() -> None:
    cache = cache_of(64)
    sequence = cache.open()
    assert cache.reserve(sequence, 3)
    view = cache.view([Span(sequence, 3)])
    whole = torch.zeros(3, 2, 16)
    for k, v in ((whole[:1], whole[:1]), (whole, whole[:, :1]), (whole[..., :8], whole), (whole[0], whole[0])):
        with pytest.raises(ValueError, match=r"layer 0 takes keys and values \(3, 2, 16\)"):
            view.write(0, k, v)
    with pytest.raises(ValueError, match="layer 9 is not in this cache: it has 2, from 0 on"):
        view.write(9, whole, whole)
