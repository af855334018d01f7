"""Random lives of sequences, against a dictionary of the tokens that each should hold.

The groups are like Gemma's, a full one beside windows, with pages of a few kilobytes and a budget of a few dozen pages.
Keys and values follow from a token alone and are exact in the cache's format, so that every reading is known.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cache_checks import bytes_in_use, check_books, committed_bytes, reserved_tokens
from kvist.cache.kv_cache import CacheView, KVCache, Span
from kvist.cache.page_layout import PAGE_SLOTS
from kvist.config import CacheConfig, LayerConfig
from kvist.errors import CacheFullError, ReservationError, RewindError, SequenceError
from kvist.kv_format import KVFormat, LayerFormats

LAYERS = (LayerConfig(1, 4, 5), LayerConfig(1, 8, None), LayerConfig(2, 4, 130), LayerConfig(1, 4, 5))
EXACT = LayerFormats(KVFormat("fp32", "fp32"))
LEAST_BUDGET = sum(group.pool.stride for group in KVCache(LAYERS, CacheConfig(EXACT, 2**20)).groups)
MAX_STEP = 150
MOST_SEQUENCES = 5

# Counts around the borders of pages, windows and steps.
NEAR = sorted({max(0, border + d) for border in (0, 5, 64, 128, 130, MAX_STEP) for d in (-1, 0, 1)})
FEW = st.one_of(st.sampled_from(NEAR), st.integers(0, 400))
CHUNK = st.sampled_from([63, 64, 65, MAX_STEP])
PICK = st.integers(0, 2**16)
NAN_TOKEN, INFINITE_TOKEN = -1, -2


def vectors(tokens: list[int], layer: int) -> torch.Tensor:
    """Keys of tokens `[T, K, D]`: small whole numbers; of two tokens, none and infinite ones. Values: the negative."""
    shape = LAYERS[layer]
    ids = torch.tensor(tokens, dtype=torch.float32).reshape(-1, 1, 1)
    dims = torch.arange(shape.num_kv_heads * shape.head_dim).view(1, shape.num_kv_heads, shape.head_dim)
    keys = ids * 100 + dims + layer * 10
    keys[ids.flatten() == NAN_TOKEN] = torch.nan
    keys[ids.flatten() == INFINITE_TOKEN] = torch.inf
    return keys


@dataclass
class Known:
    """What a sequence should hold: its tokens, and for each window the first page that is kept.

    Pages are dropped as it grows, and do not come back: slack counts from the `longest` that it has been.
    """

    tokens: list[int] = field(default_factory=list)
    longest: int = 0
    first: dict[int, int] = field(default_factory=lambda: {5: 0, 130: 0})

    def drop(self, slack: int) -> None:
        self.longest = max(self.longest, len(self.tokens))
        for window in self.first:
            self.first[window] = max(self.first[window], max(0, len(self.tokens) - slack - window + 1) // PAGE_SLOTS)

    def rewind(self, length: int) -> int:
        lost = any(max(0, length - w + 1) < self.first[w] * PAGE_SLOTS for w in self.first)
        length = 0 if lost else length
        self.tokens = self.tokens[:length]
        if length == 0:
            self.first, self.longest = dict.fromkeys(self.first, 0), 0
        return length


def check_reading(view: CacheView, layer: int, index: int, known: Known, start: int, stop: int) -> None:
    """What is read is what was written, and zeros beyond the end and in dropped pages."""
    length, window = len(known.tokens), LAYERS[layer].window
    expected = vectors(known.tokens, layer).transpose(0, 1)
    if window is not None:
        expected[:, : known.first[window] * PAGE_SLOTS] = 0
    expected = torch.nn.functional.pad(expected[:, start:stop], (0, 0, 0, max(0, stop - max(length, start))))
    for read, whole in zip(view.read_split(layer, index, start, stop), (expected, -expected), strict=True):
        assert read.shape == whole.shape
        assert torch.equal(read.isnan(), whole.isnan())
        assert torch.equal(read.nan_to_num(7.0), whole.nan_to_num(7.0))


class CacheMachine(RuleBasedStateMachine):
    @initialize(budget=st.integers(LEAST_BUDGET, 40 * LEAST_BUDGET), slack=st.sampled_from([0, 1, 64, 100]))
    def start(self, budget: int, slack: int) -> None:
        self.slack = slack
        self.cache = KVCache(LAYERS, CacheConfig(EXACT, budget, slack, MAX_STEP))
        self.known: dict[int, Known] = {}
        self.next_token = 1
        for _ in range(2):
            self.open()

    def pick(self, number: int) -> int:
        return list(self.known)[number % len(self.known)]

    def unchanged(self, act: Callable[[], object]) -> None:
        """An act that is refused leaves everything as it was."""
        before = self.state()
        act()
        assert self.state() == before

    def state(self) -> object:
        return copy.deepcopy(
            (
                self.cache.used_bytes,
                bytes_in_use(self.cache),
                [
                    (i, s.length, s.reserved, [(t.first, t.pages) for t in s.tables])
                    for i, s in self.cache._sequences.items()
                ],
                [(g.pool._owners, sorted(g.pool._returned), g.pool._untouched) for g in self.cache.groups],
            )
        )

    @precondition(lambda self: len(self.known) < 3)
    @rule()
    def open(self) -> None:
        sequence = self.cache.open()
        assert sequence not in self.known
        self.known[sequence] = Known()

    @precondition(lambda self: bool(self.known))
    @rule(number=PICK, more=FEW, rewind=st.one_of(st.none(), PICK))
    def reserve(self, number: int, more: int, rewind: int | None) -> None:
        sequence = self.pick(number)
        cache, known = self.cache, self.known[sequence]
        num_tokens = len(known.tokens) + more
        rewind_to = None if rewind is None else rewind % (len(known.tokens) + 1)
        before = self.state()
        reserved = reserved_tokens(cache, sequence)
        is_fresh = not known.tokens and reserved_tokens(cache, sequence) == 0
        room = cache.config.memory_bytes - cache.used_bytes
        if cache.reserve(sequence, num_tokens, rewind_to=rewind_to):
            if reserved == len(known.tokens):
                reserved = 0
            if rewind_to is not None:
                assert cache.length(sequence) == known.rewind(rewind_to)
            assert reserved_tokens(cache, sequence) == max(reserved, num_tokens, len(known.tokens))
        else:
            assert self.state() == before
            assert not is_fresh or cache.bytes_for(num_tokens) > room

    @precondition(lambda self: bool(self.known))
    @rule(number=PICK)
    def unreserve(self, number: int) -> None:
        sequence = self.pick(number)
        used = self.cache.used_bytes
        self.cache.unreserve(sequence)
        assert reserved_tokens(self.cache, sequence) == len(self.known[sequence].tokens)
        assert self.cache.used_bytes <= used

    @precondition(lambda self: bool(self.known))
    @rule(number=PICK, more=FEW, chunk=CHUNK, strange=st.sampled_from([0, NAN_TOKEN, INFINITE_TOKEN]))
    def append(self, number: int, more: int, chunk: int, strange: int) -> None:
        """Reserve and go there in steps."""
        sequence = self.pick(number)
        length = self.cache.length(sequence)
        if self.cache.reserve(sequence, length + more):
            for start in range(0, more, chunk):
                self.run_step({sequence: self.new_tokens(min(chunk, more - start), strange)}, fails=False)

    @precondition(lambda self: bool(self.known))
    @rule(
        counts=st.lists(st.tuples(PICK, st.one_of(st.just(1), FEW)), min_size=1, max_size=4),
        fails=st.booleans(),
        strange=st.sampled_from([0, 0, 0, NAN_TOKEN, INFINITE_TOKEN]),
    )
    def step(self, counts: list[tuple[int, int]], fails: bool, strange: int) -> None:
        """Any step within what is reserved succeeds, over several sequences and over what failed before."""
        tokens: dict[int, list[int]] = {}
        for number, count in counts:
            sequence = self.pick(number)
            self.cache.reserve(sequence, self.cache.length(sequence) + count)
            room = reserved_tokens(self.cache, sequence) - self.cache.length(sequence)
            tokens[sequence] = self.new_tokens(min(count, room, MAX_STEP), strange)
        self.run_step(tokens, fails)

    @precondition(lambda self: bool(self.known))
    @rule(number=PICK, chunk=CHUNK)
    def grow_to_what_is_reserved(self, number: int, chunk: int) -> None:
        sequence = self.pick(number)
        while self.cache.length(sequence) < reserved_tokens(self.cache, sequence):
            left = reserved_tokens(self.cache, sequence) - self.cache.length(sequence)
            self.run_step({sequence: self.new_tokens(min(left, chunk), 0)}, fails=False)

    def new_tokens(self, count: int, strange: int) -> list[int]:
        tokens = list(range(self.next_token, self.next_token + count))
        self.next_token += count
        return [strange or token for token in tokens]

    def run_step(self, tokens: dict[int, list[int]], fails: bool) -> None:
        cache, used = self.cache, self.cache.used_bytes
        view = cache.view([Span(sequence, len(new)) for sequence, new in tokens.items()])
        assert cache.used_bytes <= used
        packed = [token for new in tokens.values() for token in new]
        for layer in range(len(LAYERS)):
            keys = vectors(packed, layer)
            view.write(layer, keys, -keys)
            for index, (sequence, new) in enumerate(tokens.items()):
                known, stop = self.known[sequence], len(self.known[sequence].tokens) + len(new)
                middle = stop // 2 // PAGE_SLOTS * PAGE_SLOTS
                for run in ((0, stop), (middle, middle + 64), (middle, stop + 1), (middle + 640, middle + 700)):
                    check_reading(view, layer, index, Known(known.tokens + new, first=known.first), *run)
        assert view.positions().tolist() == [
            len(self.known[sequence].tokens) + i for sequence, new in tokens.items() for i in range(len(new))
        ]
        if fails:
            return
        cache.commit(view)
        assert cache.used_bytes <= used
        for sequence, new in tokens.items():
            if new:
                self.known[sequence].tokens += new
                self.known[sequence].drop(self.slack)
                with pytest.raises(SequenceError, match="since this view was made"):
                    view.read_split(0, list(tokens).index(sequence), 0, 1)

    @precondition(lambda self: bool(self.known))
    @rule(number=PICK, excess=st.integers(1, 200))
    def ask_for_what_cannot_be(self, number: int, excess: int) -> None:
        """A step beyond what is reserved, and a rewind to where the sequence is not."""
        sequence = self.pick(number)
        room = reserved_tokens(self.cache, sequence) - self.cache.length(sequence)
        other = next(
            (i for i in self.known if i != sequence and reserved_tokens(self.cache, i) > self.cache.length(i)), None
        )
        spans = [Span(sequence, room + excess)] if other is None else [Span(other, 1), Span(sequence, room + excess)]

        def act() -> None:
            with pytest.raises(ReservationError, match=f"sequence {sequence}: "):
                self.cache.view(spans)
            for length in (self.cache.length(sequence) + excess, -excess):
                with pytest.raises(RewindError, match="cannot rewind to"):
                    self.cache.rewind(sequence, length)

        self.unchanged(act)

    @precondition(lambda self: 0 < len(self.known) < MOST_SEQUENCES)
    @rule(number=PICK)
    def fork(self, number: int) -> None:
        sequence = self.pick(number)
        before = self.state()
        try:
            fork = self.cache.fork(sequence)
        except CacheFullError:
            assert self.state() == before
            assert reserved_tokens(self.cache, sequence) > self.cache.length(sequence)
        else:
            self.known[fork] = copy.deepcopy(self.known[sequence])
            assert self.cache.sequence_bytes(fork) <= self.cache.sequence_bytes(sequence)

    @precondition(lambda self: bool(self.known))
    @rule(number=PICK, back=st.one_of(st.sampled_from([0, 1, 63, 64, 65, 100, 101]), PICK))
    def rewind(self, number: int, back: int) -> None:
        sequence = self.pick(number)
        known = self.known[sequence]
        length = len(known.tokens) - back % (len(known.tokens) + 1)
        before = self.state()
        try:
            kept = self.cache.rewind(sequence, length)
        except CacheFullError:
            assert self.state() == before
            assert reserved_tokens(self.cache, sequence) > self.cache.length(sequence)
        else:
            longest = known.longest
            assert kept == known.rewind(length) == self.cache.length(sequence)
            assert kept == length or length < longest - self.slack

    @precondition(lambda self: len(self.known) > 1)
    @rule(number=PICK)
    def release(self, number: int) -> None:
        sequence = self.pick(number)
        view = self.cache.view(
            [Span(sequence, min(1, reserved_tokens(self.cache, sequence) - self.cache.length(sequence)))]
        )
        self.cache.release(sequence)
        del self.known[sequence]

        def act() -> None:
            calls: list[Callable[[], object]] = [
                lambda: self.cache.fork(sequence),
                lambda: self.cache.rewind(sequence, 0),
                lambda: self.cache.reserve(sequence, 1),
                lambda: self.cache.view([Span(sequence, 1)]),
                lambda: self.cache.release(sequence),
                lambda: self.cache.length(sequence),
            ]
            for call in calls:
                with pytest.raises(
                    SequenceError, match=f"sequence {sequence} is not open in this cache: it was released"
                ):
                    call()
            keys = vectors([7] * view.num_tokens, 0)
            with pytest.raises(SequenceError, match="since this view was made"):
                view.write(0, keys, keys)
            with pytest.raises(SequenceError, match="since this view was made"):
                self.cache.commit(view)

        self.unchanged(act)

    @invariant()
    def everything_is_where_it_should_be(self) -> None:
        if not hasattr(self, "cache"):
            return
        check_books(self.cache)
        for group in self.cache.groups:
            committed = committed_bytes(group.pool)
            assert committed is None or committed == group.pool.bytes_in_use
        for sequence, known in self.known.items():
            assert self.cache.length(sequence) == len(known.tokens)
            view = self.cache.view([Span(sequence, 0)])
            for layer in range(len(LAYERS)):
                check_reading(view, layer, 0, known, 0, len(known.tokens) + 70)

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            for sequence in list(self.known):
                self.cache.release(sequence)
                check_books(self.cache)
            assert self.cache.used_bytes == bytes_in_use(self.cache) == 0


CacheMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestRandomLives = CacheMachine.TestCase
