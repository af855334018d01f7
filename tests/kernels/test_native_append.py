"""Native writing of keys and values: the bytes are those of the plain codec."""

from __future__ import annotations

import functools
import itertools
import os
import re
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from key_texts import statics_of
from kvist.cache.page_codec import PageCodec
from kvist.cache.page_layout import PAGE_SLOTS, PageLayout
from kvist.config import LayerConfig
from kvist.kernels import native
from kvist.kernels.key_statics import KeyStatics, PageTurns
from kvist.kernels.native_types import PageLayer, PageStep
from kvist.kv_format import KV_FORMATS, KVFormat

PAIRS = [KVFormat(keys, values) for keys, values in itertools.product(KV_FORMATS, repeat=2)]
SAME = [KVFormat(name, name) for name in KV_FORMATS]
# Blocks of the rotation from 8 to 1,024 dims, groups of 8 to 160, last tiles of values that are full and not.
HEAD_DIMS = (8, 16, 24, 40, 64, 80, 88, 96, 128, 160, 256, 1024)
ODD = (torch.nan, torch.inf, -torch.inf, 3e38, -0.0)

Spans = Sequence[tuple[int, int]]
"""The first position and the number of tokens of each."""


@functools.cache
def statics_for(head_dim: int, num_kv_heads: int) -> KeyStatics:
    return statics_of(head_dim, num_kv_heads)


@pytest.fixture(params=native.available_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set in turn."""
    library = native._library()
    library.choose_isa(request.param)
    yield request.param
    library.choose_isa(os.environ.get(native.MAX_ISA_VARIABLE, ""))


class Case:
    """A step's tokens, in pages of which each span has its own. The layer is the second of two."""

    def __init__(
        self,
        kv_format: KVFormat,
        head_dim: int,
        num_kv_heads: int,
        spans: Spans,
        statics: KeyStatics | None = None,
        seed: int = 0,
    ) -> None:
        self.spans, self.statics = spans, statics
        self.num_tokens = sum(count for _, count in spans)
        self.shape = (self.num_tokens, num_kv_heads, head_dim)
        self.layout = PageLayout(
            [LayerConfig(1, 8, None), LayerConfig(num_kv_heads, head_dim, None)], [KVFormat("fp32", "bf16"), kv_format]
        )
        self.generator = torch.Generator().manual_seed(seed)
        # A span's table begins with the page of its first token.
        sizes = [(first + count - 1) // PAGE_SLOTS - first // PAGE_SLOTS + 1 for first, count in spans]
        self.num_pages = sum(sizes) + 2
        self.tables = torch.randperm(self.num_pages, generator=self.generator)[: sum(sizes)].split(sizes)
        # Full of what earlier owners left.
        self.before = torch.randint(
            0, 256, (self.num_pages, self.layout.page_bytes + 64), dtype=torch.uint8, generator=self.generator
        )

    def random(self, odd: int = 0) -> torch.Tensor:
        """Vectors of all sizes, some zero, of which `odd` have a number that is not finite, or nearly not."""
        x = torch.randn(self.shape, generator=self.generator)
        x *= 10.0 ** torch.randint(-3, 4, (*self.shape[:2], 1), generator=self.generator)
        if self.num_tokens:
            x[self._any(self.num_tokens)] *= 0
            for i in range(odd):
                x[self._any(self.num_tokens), self._any(self.shape[1]), self._any(self.shape[2])] = ODD[i % len(ODD)]
        return x

    def _any(self, stop: int) -> int:
        return int(torch.randint(stop, (), generator=self.generator))

    def step(self, pages: torch.Tensor) -> PageStep:
        window = min((first % PAGE_SLOTS + 1 for first, _ in self.spans), default=1)  # the tables hold no more
        turns = [] if self.statics is None else [PageTurns(self.statics.frequencies).table(self._numbers_stop())]
        return native.page_step(
            pages,
            self.layout.page_bytes,
            num_tokens=[count for _, count in self.spans],
            first_positions=[first for first, _ in self.spans],
            first_numbers=[first // PAGE_SLOTS for first, _ in self.spans],
            page_tables=self.tables,
            turns=turns,
            window=window,
        )

    def layer(self) -> PageLayer:
        place, statics = self.layout.layers[1], self.statics
        keys = place.kv_format.keys
        if keys not in ("int8", "int4"):
            statics = None
        return native.page_layer(
            keys,
            place.kv_format.values,
            place.head_dim,
            place.num_kv_heads,
            place.offset,
            key_offset=None if statics is None else statics.offset,
            key_scale=None if statics is None else statics.scale,
            key_feedback=None if statics is None or keys != "int4" else statics.feedback.contiguous(),
        )

    def appended(self, k: torch.Tensor, v: torch.Tensor, num_threads: int = 1) -> torch.Tensor:
        pages = self.before.clone()
        self.step(pages).append(self.layer(), k, v, num_threads=num_threads)
        return pages

    def expected(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        pages = self.before.clone()
        positions = torch.cat([torch.arange(first, first + count) for first, count in self.spans])
        numbers = positions // PAGE_SLOTS
        ids = [
            table[torch.arange(first, first + count) // PAGE_SLOTS - first // PAGE_SLOTS]
            for (first, count), table in zip(self.spans, self.tables, strict=True)
        ]
        codec = PageCodec(self.layout, [None, self.statics])
        codec.write(pages[:, : self.layout.page_bytes], 1, torch.cat(ids), positions % PAGE_SLOTS, numbers, k, v)
        return pages

    def _numbers_stop(self) -> int:
        return max(((first + count - 1) // PAGE_SLOTS + 1 for first, count in self.spans), default=0)


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, rows and heads further apart, as slices of a product have them."""
    wide = torch.full((x.shape[0], x.shape[1] + 1, 2 * x.shape[2] + 3), torch.nan, dtype=x.dtype)
    wide[:, 1:, 1 : x.shape[2] + 1] = x
    return wide[:, 1:, 1 : x.shape[2] + 1]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Case, torch.Tensor, torch.Tensor]:
    head_dim = draw(st.sampled_from(HEAD_DIMS))
    num_kv_heads = draw(st.integers(1, 4))
    first = st.integers(0, 150 * PAGE_SLOTS)
    spans = draw(
        st.lists(st.tuples(first, st.sampled_from((1, 1, 2, 5, 16, 33, 63, 64, 65, 100))), min_size=1, max_size=5)
    )
    statics = statics_for(head_dim, num_kv_heads) if head_dim < 512 and draw(st.booleans()) else None
    case = Case(draw(st.sampled_from(PAIRS)), head_dim, num_kv_heads, spans, statics, draw(st.integers(0, 2**31)))
    vectors = []
    for _ in "kv":
        x = case.random(odd=draw(st.integers(0, 4))).to(draw(st.sampled_from((torch.float32, torch.bfloat16))))
        vectors.append(strided(x) if draw(st.booleans()) else x)
    return case, vectors[0], vectors[1]


@settings(max_examples=150, deadline=None)
@given(drawn=cases())
def test_the_bytes_are_the_codec_s_at_every_instruction_set(
    drawn: tuple[Case, torch.Tensor, torch.Tensor],
) -> None:
    case, k, v = drawn
    expected = case.expected(k, v)
    library = native._library()
    try:
        for name, num_threads in zip(native.available_isas(), itertools.cycle((1, 3, 2, 4))):
            library.choose_isa(name)
            assert torch.equal(case.appended(k, v, num_threads), expected), (name, num_threads)
    finally:
        library.choose_isa(os.environ.get(native.MAX_ISA_VARIABLE, ""))


@pytest.mark.parametrize("kv_format", PAIRS, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_every_pair_of_formats(isa: str, kv_format: KVFormat, head_dim: int) -> None:
    for spans in ([(130, 1)], [(62, 100), (5, 1)]):
        case = Case(kv_format, head_dim, 2, spans, statics_for(head_dim, 2))
        k, v = case.random(), case.random()
        assert torch.equal(case.appended(k, v, 2), case.expected(k, v))


@pytest.mark.parametrize(
    ("name", "head_dim"),
    [(name, dim) for name in KV_FORMATS for dim in (1, 2, 4, 6, 12, 20, 36) if native.takes_head_dim(name, dim)],
)
def test_head_dims_that_not_every_format_takes(isa: str, name: str, head_dim: int) -> None:
    case = Case(KVFormat(name, name), head_dim, 3, [(60, 20)])
    k, v = case.random(odd=3), case.random(odd=3)
    assert torch.equal(case.appended(k, v), case.expected(k, v))


@pytest.mark.parametrize("kv_format", SAME, ids=str)
@pytest.mark.parametrize("num_threads", [1, 2, 3, 4, 7])
def test_tokens_that_share_bytes_are_all_written(kv_format: KVFormat, num_threads: int) -> None:
    """Sequences that were cut within a page, whose rows the threads would divide otherwise."""
    spans = [(3, 1), (0, 200), (1, 1), (64, 64), (7, 2), (40, 40)]
    case = Case(kv_format, 64, 1, spans, statics_for(64, 1))
    for _ in range(5):
        k, v = case.random(), case.random()
        assert torch.equal(case.appended(k, v, num_threads), case.expected(k, v))


@pytest.mark.parametrize("kv_format", SAME, ids=str)
def test_spans_that_share_a_page_keep_each_other_s_tokens(kv_format: KVFormat) -> None:
    """They do not come from one cache, but no place is written twice."""
    case = Case(kv_format, 64, 3, [(0, 3), (3, 1), (4, 3), (7, 57)], statics_for(64, 3))
    case.tables = (case.tables[0],) * 4
    k, v = case.random(), case.random()
    for num_threads in (1, 2, 4):
        assert torch.equal(case.appended(k, v, num_threads), case.expected(k, v))


@pytest.mark.parametrize("kv_format", SAME, ids=str)
def test_an_empty_step_writes_nothing(kv_format: KVFormat) -> None:
    case = Case(kv_format, 64, 2, [])
    empty = torch.empty(case.shape)
    assert torch.equal(case.appended(empty, empty), case.before)


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("number", ODD)
def test_a_number_that_is_none_stays_with_its_token(isa: str, name: str, number: float) -> None:
    case = Case(KVFormat(name, name), 64, 2, [(0, PAGE_SLOTS)], statics_for(64, 2))
    k, v = case.random(), case.random()
    clean = case.appended(k, v)
    k[9, 0, 5] = v[9, 0, 63] = number
    assert torch.equal(case.appended(k, v), case.expected(k, v))
    place = case.layout.layers[1]
    start = place.offset + place.head.num_bytes
    second = slice(start, start + place.head.num_bytes)
    page = int(case.tables[0][0])
    assert torch.equal(case.appended(k, v)[page, second], clean[page, second])


@pytest.mark.parametrize(
    ("k", "message"),
    [
        (torch.zeros(3, 2, 64, dtype=torch.float16), "k must have dtype float32 or bfloat16"),
        (torch.zeros(3, 128), "k has 2 dimensions: it must have 3"),
        (torch.zeros(2, 2, 64), "k has the shape [2, 2, 64]: it must be [3, 2, 64]"),
        (torch.zeros(3, 3, 64), "k has the shape [3, 3, 64]: it must be [3, 2, 64]"),
        (torch.zeros(3, 2, 80), "k has the shape [3, 2, 80]: it must be [3, 2, 64]"),
        (torch.zeros(3, 2, 128)[..., ::2], "k has stride 2 in its last dimension: it must be 1"),
    ],
)
def test_append_says_what_is_wrong_with_its_arguments(k: torch.Tensor, message: str) -> None:
    case = Case(SAME[2], 64, 2, [(0, 3)])
    pages, v = case.before.clone(), torch.zeros(3, 2, 64)
    with pytest.raises(ValueError, match=re.escape(message)):
        case.step(pages).append(case.layer(), k, v, num_threads=1)
    with pytest.raises(ValueError, match=re.escape("v" + message[1:])):
        case.step(pages).append(case.layer(), v, k, num_threads=1)
    assert torch.equal(pages, case.before)


@pytest.mark.parametrize("name", ["k", "v"])
def test_keys_and_values_lie_apart_from_the_pages(name: str) -> None:
    case = Case(SAME[2], 64, 2, [(0, 3)])
    pages = case.before.clone()
    vectors = {"k": torch.zeros(case.shape), "v": torch.zeros(case.shape)}
    # The end of the last page, which the step does not write.
    vectors[name] = pages[-1, -3 * 2 * 64 * 4 :].view(torch.float32).view(case.shape)
    with pytest.raises(ValueError, match=rf"^{name} and the pool must not overlap$"):
        case.step(pages).append(case.layer(), **vectors, num_threads=1)
    assert torch.equal(pages, case.before)


@pytest.mark.parametrize("num_threads", [0, -1, 1025])
def test_the_number_of_threads_has_bounds(num_threads: int) -> None:
    case = Case(SAME[2], 64, 2, [(0, 3)])
    with pytest.raises(ValueError, match=f"num_threads is {num_threads}: it must be from 1 to 1024"):
        case.appended(case.random(), case.random(), num_threads)


def test_a_layer_of_other_pages_is_refused() -> None:
    case, other = Case(SAME[2], 64, 2, [(0, 3)]), Case(SAME[0], 64, 4, [(0, 3)])
    x = other.random()
    with pytest.raises(ValueError, match="the layer ends at byte"):
        case.step(case.before.clone()).append(other.layer(), x, x, num_threads=1)
