"""Native attention over pages against the plain one over what the pages hold."""

from __future__ import annotations

import itertools
import math
import os
import random as python_random
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from kvist.cache.page_codec import PageCodec
from kvist.cache.page_layout import PAGE_SLOTS, PageLayout
from kvist.config import LayerConfig
from kvist.kernels import native, split_attention
from kvist.kernels.key_statics import KeyStatics, PageTurns
from kvist.kernels.native_types import PageLayer, PageStep
from kvist.kernels.rotation import rotate
from kvist.kernels.split_attention import SPLIT
from kvist.kv_format import KV_FORMATS, KVFormat

PAIRS = [KVFormat(keys, values) for keys, values in itertools.product(KV_FORMATS, repeat=2)]
SAME = [KVFormat(name, name) for name in KV_FORMATS]

# The root mean square of what a result may be off, over that of the result: no more than four times what was measured.
# Keys: codes of queries have two bytes for int8 and one for int4.
KEY_TOLERANCES = {"fp32": 1e-6, "bf16": 1e-6, "int8": 2e-4, "int4": 0.04}
# Values: codes of weights have two bytes, or one on some instruction sets.
VALUE_TOLERANCES = {"fp32": 1e-6, "bf16": 1e-6, "int8": 2e-4, "int4": 2e-4}
BYTE_TOLERANCES = {"int8": 8e-3, "int4": 0.012}
BYTE_ISAS = {"int8": ("avx512",), "int4": ("avx512", "avx2", "baseline")}
# A result that is rounded to bf16.
BF16_TOLERANCE = 2e-3
# The largest number that a result may be off, in the same units.
MOST_OVER_RMS = 15


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rms(x: torch.Tensor) -> float:
    return float(x.float().square().mean().sqrt())


@dataclass(frozen=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    head_dim: int


class Pool:
    """Sequences of random keys and values in pages that were full of anything; the layer is the second of two.

    Args:
        shape: of the layer.
        kv_format: how it is stored.
        lengths: of the sequences.
        shared: tokens that all sequences have in common, in the same pages; a multiple of a page.
        statics: whether quantised keys have them.
    """

    def __init__(
        self,
        shape: Shape,
        kv_format: KVFormat,
        lengths: Sequence[int],
        *,
        shared: int = 0,
        statics: bool = True,
        seed: int = 0,
    ) -> None:
        self.shape, self.kv_format, self.lengths = shape, kv_format, lengths
        layers = [LayerConfig(1, 8, None), LayerConfig(shape.num_kv_heads, shape.head_dim, None)]
        self.layout = PageLayout(layers, [KVFormat("fp32", "bf16"), kv_format])
        self.statics = _statics(shape, kv_format) if statics and kv_format.keys in ("int8", "int4") else None
        self.codec = PageCodec(self.layout, [None, self.statics])
        rng = python_random.Random(seed)
        counts = [-(-length // PAGE_SLOTS) - shared // PAGE_SLOTS for length in lengths]
        num_pages = sum(counts) + shared // PAGE_SLOTS + 2
        generator = torch.Generator().manual_seed(seed + 1)
        stride = self.layout.page_bytes + 64
        self.pages = torch.randint(0, 256, (num_pages, stride), dtype=torch.uint8, generator=generator)
        free = rng.sample(range(num_pages), num_pages)
        common = [free.pop() for _ in range(shared // PAGE_SLOTS)]
        self.tables = [torch.tensor(common + [free.pop() for _ in range(count)]) for count in counts]
        for index, (length, table) in enumerate(zip(lengths, self.tables, strict=True)):
            k, v = (random(length, shape.num_kv_heads, shape.head_dim, seed=seed + 7 * index + i) for i in (0, 1))
            start = shared if index else 0
            self.write(table, start, k[start:], v[start:])

    def write(self, table: torch.Tensor, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        positions = torch.arange(start, start + len(k))
        numbers = positions // PAGE_SLOTS
        self.codec.write(
            self.pages[:, : self.layout.page_bytes], 1, table[numbers], positions % PAGE_SLOTS, numbers, k, v
        )

    def layer(self) -> PageLayer:
        place, statics = self.layout.layers[1], self.statics
        kv_format = self.kv_format
        return native.page_layer(
            kv_format.keys,
            kv_format.values,
            place.head_dim,
            place.num_kv_heads,
            place.offset,
            key_offset=None if statics is None else statics.offset,
            key_scale=None if statics is None else statics.scale,
            key_feedback=None if statics is None or kv_format.keys != "int4" else statics.feedback,
        )

    def turns(self) -> list[torch.Tensor]:
        if self.statics is None:
            return []
        turns = PageTurns(self.statics.frequencies)
        return [turns.table(max(map(len, self.tables)))]

    def step(self, spans: Sequence[tuple[int, int, int]], window: int | None = None) -> PageStep:
        """A step of spans: sequence, first position, tokens. Pages that no query sees are not in the tables."""
        first_numbers, tables = [], []
        for sequence, first, count in spans:
            first_numbers.append(0 if window is None else max(0, first - window + 1) // PAGE_SLOTS)
            tables.append(self.tables[sequence][first_numbers[-1] : -(-(first + count) // PAGE_SLOTS)])
        return native.page_step(
            self.pages,
            self.layout.page_bytes,
            num_tokens=[count for _, _, count in spans],
            first_positions=[first for _, first, _ in spans],
            first_numbers=first_numbers,
            page_tables=tables,
            turns=self.turns(),
            window=window,
        )

    def attend(
        self,
        q: torch.Tensor,
        spans: Sequence[tuple[int, int, int]],
        *,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        num_threads: int = 1,
    ) -> torch.Tensor:
        out = torch.full_like(q, float("nan"))
        self.step(spans, window).attend(
            self.layer(), q, out, scale=self.scale, window=window, softcap=softcap, sinks=sinks, num_threads=num_threads
        )
        return out

    @property
    def scale(self) -> float:
        return self.shape.head_dim**-0.5

    def expected(
        self,
        q: torch.Tensor,
        spans: Sequence[tuple[int, int, int]],
        *,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out, row = torch.empty_like(q), 0
        for sequence, first, count in spans:
            end = first + count

            def read(start: int, stop: int, sequence: int = sequence, end: int = end) -> tuple[torch.Tensor, ...]:
                table = self.tables[sequence][start // PAGE_SLOTS : min(stop, end + PAGE_SLOTS - 1) // PAGE_SLOTS]
                numbers = torch.arange(start // PAGE_SLOTS, start // PAGE_SLOTS + len(table))
                read = self.codec.read(self.pages[:, : self.layout.page_bytes], 1, table, numbers)
                placed = tuple(x.new_zeros(x.shape[0], stop - start, x.shape[2]) for x in read)
                for zeros, x in zip(placed, read, strict=True):
                    zeros[:, : min(end, stop) - start] = x[:, : min(end, stop) - start]
                return placed

            out[row : row + count] = split_attention.attention(
                q[row : row + count],
                read,  # type: ignore[arg-type]
                first,
                num_kv_heads=self.shape.num_kv_heads,
                scale=self.scale,
                window=window,
                softcap=softcap,
                sinks=sinks,
            )
            row += count
        return out

    def is_near(self, given: torch.Tensor, expected: torch.Tensor) -> bool:
        """Whether a result is off by no more than its formats and dtype explain."""
        values = self.kv_format.values
        has_bytes = native.isa() in BYTE_ISAS.get(values, ())
        tolerance = KEY_TOLERANCES[self.kv_format.keys] + (BYTE_TOLERANCES if has_bytes else VALUE_TOLERANCES)[values]
        if given.dtype == torch.bfloat16:
            tolerance += BF16_TOLERANCE
        off, allowed = given.float() - expected.float(), tolerance * rms(expected)
        return rms(off) <= allowed and float(off.abs().max()) <= MOST_OVER_RMS * allowed


def _statics(shape: Shape, kv_format: KVFormat) -> KeyStatics:
    group = native.group_dims(kv_format.keys, shape.head_dim)
    generator = torch.Generator().manual_seed(3)
    offset = torch.randn(shape.num_kv_heads, shape.head_dim, generator=generator) * 3
    scale = torch.rand(shape.num_kv_heads, shape.head_dim, generator=generator) * 2 + 0.3
    feedback = torch.eye(group).repeat(shape.num_kv_heads, shape.head_dim // group, 1, 1)
    rates = 10_000.0 ** (-torch.arange(shape.head_dim // 2) / (shape.head_dim // 2))
    return KeyStatics(offset, scale, feedback, rates)


def queries(shape: Shape, num_tokens: int, dtype: torch.dtype = torch.float32, seed: int = 9) -> torch.Tensor:
    return random(num_tokens, shape.num_heads, shape.head_dim, seed=seed).to(dtype)


SHAPES = [
    Shape(9, 3, 64),
    Shape(8, 2, 128),
    Shape(4, 1, 256),
    Shape(4, 2, 80),
    Shape(3, 3, 96),
    Shape(14, 2, 24),
    Shape(7, 1, 8),
    Shape(64, 1, 40),
]
# First positions and tokens around every border: of a page, of a split, and of what is computed in tiles.
SPANS = [
    [(0, 0, 1)],
    [(0, PAGE_SLOTS - 1, 2), (1, PAGE_SLOTS, 1)],
    [(0, SPLIT - 2, 5), (1, 0, 3), (2, 2 * SPLIT + 7, 1)],
    [(0, 0, SPLIT + 3), (2, 300, 1)],
    [(1, 5, 100), (0, 2 * SPLIT - 60, 61)],
]
WINDOWS = [None, 1, 5, PAGE_SLOTS, SPLIT + 1]


def lengths_of(spans: Sequence[tuple[int, int, int]]) -> list[int]:
    """Of each sequence; it goes on behind its span, where nobody may look."""
    return [max([1, *(first + count + 3 for index, first, count in spans if index == i)]) for i in range(3)]


def cases() -> list[tuple[Shape, KVFormat, int, int | None]]:
    """Each shape with each format once, everything else drawn for it."""
    rng = python_random.Random(0)
    pairs = [(shape, kv_format) for shape in SHAPES for kv_format in PAIRS]
    return [(shape, kv_format, rng.randrange(len(SPANS)), rng.choice(WINDOWS)) for shape, kv_format in pairs]


@pytest.mark.parametrize(("shape", "kv_format", "spans", "window"), cases(), ids=str)
def test_it_is_attention_over_what_the_pages_hold(
    shape: Shape, kv_format: KVFormat, spans: int, window: int | None
) -> None:
    pool = Pool(shape, kv_format, lengths_of(SPANS[spans]))
    q = queries(shape, sum(count for *_, count in SPANS[spans]))
    given, expected = (f(q, SPANS[spans], window=window) for f in (pool.attend, pool.expected))
    assert pool.is_near(given, expected)


@pytest.mark.parametrize("kv_format", SAME, ids=str)
@pytest.mark.parametrize("options", [{"softcap": 2.0}, {"sinks": True}, {"softcap": 5.0, "sinks": True}], ids=str)
def test_scores_are_capped_and_a_sink_takes_its_share(kv_format: KVFormat, options: dict[str, object]) -> None:
    shape, spans = SHAPES[0], [(0, SPLIT + 5, 1), (1, 0, 70)]
    pool = Pool(shape, kv_format, [SPLIT + 6, 70, 1])
    if "sinks" in options:
        options = options | {"sinks": torch.linspace(-3, 6, shape.num_heads)}
    q = queries(shape, 71)
    given, expected = (f(q, spans, **options) for f in (pool.attend, pool.expected))  # type: ignore[arg-type]
    assert pool.is_near(given, expected)
    assert (given - pool.attend(q, spans)).abs().max() > 0.1


@pytest.mark.parametrize("kv_format", SAME, ids=str)
@pytest.mark.parametrize("softcap", [1e4, 1e8, 1e30])
def test_a_cap_that_no_score_comes_near_changes_nothing(kv_format: KVFormat, softcap: float) -> None:
    spans = [(0, SPLIT + 5, 1), (1, 0, 70)]
    pool = Pool(SHAPES[0], kv_format, [SPLIT + 6, 70, 1])
    q = queries(SHAPES[0], 71)
    assert pool.is_near(pool.attend(q, spans, softcap=softcap), pool.expected(q, spans))


@pytest.mark.parametrize("kv_format", SAME, ids=str)
def test_bf16_queries_give_a_bf16_result(kv_format: KVFormat) -> None:
    shape, spans = SHAPES[1], [(0, 300, 1), (1, 0, 70)]
    pool = Pool(shape, kv_format, [301, 70, 1])
    q = queries(shape, 71, torch.bfloat16)
    given, expected = pool.attend(q, spans), pool.expected(q.float(), spans)
    assert given.dtype == torch.bfloat16
    assert pool.is_near(given, expected)


@pytest.mark.parametrize("kv_format", SAME, ids=str)
@pytest.mark.parametrize("statics", [False, True])
def test_keys_may_have_statics_or_not(kv_format: KVFormat, statics: bool) -> None:
    pool = Pool(SHAPES[0], kv_format, [200, 1, 1], statics=statics)
    q = queries(SHAPES[0], 1)
    given, expected = (f(q, [(0, 199, 1)]) for f in (pool.attend, pool.expected))
    assert pool.is_near(given, expected)


@pytest.mark.parametrize("shape", [Shape(6, 1, 520), Shape(2, 1, 1024)], ids=str)
@pytest.mark.parametrize("kv_format", SAME, ids=str)
def test_heads_may_be_deep(shape: Shape, kv_format: KVFormat) -> None:
    """Sums of so many products fit into 32 bits with queries of fewer."""
    spans = [(0, SPLIT + 5, 1), (1, 0, 20)]
    pool = Pool(shape, kv_format, [SPLIT + 6, 20, 1])
    q = queries(shape, 21)
    assert pool.is_near(pool.attend(q, spans), pool.expected(q, spans))


@pytest.mark.parametrize("factor", [0.0, 1e-37, 1e-33, 1e-30, 1e30])
@pytest.mark.parametrize("kv_format", SAME[2:], ids=str)
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[4]], ids=str)
def test_values_of_any_size_are_mixed(shape: Shape, kv_format: KVFormat, factor: float) -> None:
    length = SPLIT + 6
    pool = Pool(shape, kv_format, [length, 1, 1])
    k, v = (random(length, shape.num_kv_heads, shape.head_dim, seed=i) for i in (0, 1))
    pool.write(pool.tables[0], 0, k, v * factor)
    q = queries(shape, 1)
    given, expected = (f(q, [(0, length - 1, 1)]) for f in (pool.attend, pool.expected))
    # Products of weights and steps below 2^-100 count as nothing.
    assert float((given - expected).abs().max()) < 0.1 * factor + (2e-29 if factor < 1e-25 else 0)
    assert factor < 1e-25 or pool.is_near(given, expected)


def rotated(x: torch.Tensor) -> torch.Tensor:
    return rotate(x.movedim(-1, 0)).movedim(0, -1)


@pytest.mark.parametrize("head_dim", [32, 40, 64, 88, 256])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("kv_format", SAME[2:], ids=str)
def test_sums_of_the_largest_codes_fit(kv_format: KVFormat, sign: int, head_dim: int) -> None:
    """Codes are made of rotated vectors: here all are the largest or smallest, queries' and weights' codes too."""
    pool = Pool(Shape(1, 1, head_dim), kv_format, [SPLIT, 1, 1], statics=False)
    pattern = torch.full((SPLIT, 1, head_dim), float(sign))
    pattern[..., :: native.group_dims(kv_format.keys, head_dim)] = -sign
    pool.write(pool.tables[0], 0, rotated(pattern), rotated(-pattern))
    q = rotated(torch.full((1, 1, head_dim), 0.01))
    given, expected = (f(q, [(0, SPLIT - 1, 1)]) for f in (pool.attend, pool.expected))
    assert pool.is_near(given, expected)


@pytest.mark.parametrize("position", [0, 1, 62, 63, 64])
@pytest.mark.parametrize("kv_format", SAME, ids=str)
def test_a_row_that_sees_one_slot_gives_its_value(kv_format: KVFormat, position: int) -> None:
    shape = SHAPES[0]
    pool = Pool(shape, kv_format, [position + 1, 1, 1])
    q = queries(shape, 1)
    given, expected = (f(q, [(0, position, 1)], window=1) for f in (pool.attend, pool.expected))
    assert rms(given - expected) < 1e-5 * rms(expected)


WEIGHTS = [(2.0, 1.0), (5.0, 1.0), (6.27, 1.0)]
VALUES = [(0.0, 10.0), (0.0, 100.0), (0.0, 530.0)]


@pytest.mark.parametrize(("heavy", "large"), WEIGHTS + VALUES)
@pytest.mark.parametrize("slots", [[3], [3, 17, 41]], ids=len)
@pytest.mark.parametrize("length", [PAGE_SLOTS, SPLIT, PAGE_SLOTS - 20])
@pytest.mark.parametrize(("values", "most"), [("int4", 0.007), ("int8", 0.003)])
def test_what_is_small_beside_a_few_slots_is_not_lost_as_a_whole(
    values: str, most: float, heavy: float, large: float, slots: list[int], length: int
) -> None:
    """Some slots have a heavy weight or a large value, all others have the same: rounded alike, they would vanish."""
    pool = Pool(Shape(1, 1, 64), KVFormat("fp32", values), [length, 1, 1])
    k, v = torch.zeros(length, 1, 64), random(1, 1, 64).expand(length, 1, 64).clone()
    k[slots, 0, 0] = heavy
    v[slots] = random(len(slots), 1, 64, seed=5) * large
    pool.write(pool.tables[0], 0, k, v)
    q = torch.zeros(1, 1, 64)
    q[0, 0, 0] = 64**0.5
    given, expected = (f(q, [(0, length - 1, 1)]) for f in (pool.attend, pool.expected))
    assert rms(given - expected) < most * rms(expected)


# --- the same bits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("kv_format", [*SAME, KVFormat("int8", "int4"), KVFormat("bf16", "int8")], ids=str)
def test_a_row_has_the_same_bits_in_any_chunks_batches_and_threads(kv_format: KVFormat, window: int | None) -> None:
    shape, lengths = SHAPES[0], [SPLIT + 40, 133, 3]
    pool = Pool(shape, kv_format, lengths)
    k, v = (random(lengths[0], shape.num_kv_heads, shape.head_dim, seed=i) for i in (0, 1))
    v[5::37] *= 100  # how weights are coded depends on such values
    pool.write(pool.tables[0], 0, k, v)
    whole = [queries(shape, length, seed=length) for length in lengths]
    expected = [pool.attend(q, [(i, 0, len(q))], window=window, num_threads=1) for i, q in enumerate(whole)]
    rng = python_random.Random(1)
    for num_threads in (1, 2, 3, 4):
        done = [0, 0, 0]
        while done != lengths:
            spans = []
            for i in rng.sample(range(3), 3):
                count = min(rng.choice([1, 2, 17, 64, 200]), lengths[i] - done[i])
                if count:
                    spans.append((i, done[i], count))
                    done[i] += count
            q = torch.cat([whole[i][first : first + count] for i, first, count in spans])
            given = pool.attend(q, spans, window=window, num_threads=num_threads)
            assert torch.equal(given, torch.cat([expected[i][first : first + count] for i, first, count in spans]))


@pytest.mark.parametrize("kv_format", SAME, ids=str)
@pytest.mark.parametrize("num_sequences", [2, 40])
def test_sequences_that_share_pages_have_the_bits_that_they_have_apart(kv_format: KVFormat, num_sequences: int) -> None:
    shape, shared = SHAPES[0], SPLIT + PAGE_SLOTS
    lengths = [shared + 1 + 29 * i % 300 for i in range(num_sequences)]
    pool = Pool(shape, kv_format, lengths, shared=shared)
    spans = [(i, length - 1, 1) for i, length in enumerate(lengths)]
    q = queries(shape, num_sequences)
    together = pool.attend(q, spans, num_threads=2)
    apart = torch.cat([pool.attend(q[i : i + 1], [span], num_threads=1) for i, span in enumerate(spans)])
    assert torch.equal(together, apart)


def test_queries_of_any_strides_give_the_same_bits() -> None:
    shape = SHAPES[0]
    pool = Pool(shape, KVFormat("int8", "int8"), [70, 1, 1])
    q = queries(shape, 70)
    expected = pool.attend(q, [(0, 0, 70)])
    wide = torch.zeros(70, shape.num_heads + 2, shape.head_dim)
    wide[:, 1:-1] = q
    heads_first = torch.full((shape.num_heads, 70, shape.head_dim), float("nan")).transpose(0, 1)
    step = pool.step([(0, 0, 70)])
    step.attend(pool.layer(), wide[:, 1:-1], heads_first, scale=pool.scale, num_threads=2)
    assert torch.equal(heads_first, expected)


# --- what is no number ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", [float("nan"), float("inf")])
@pytest.mark.parametrize("kv_format", [*SAME, KVFormat("int8", "bf16")], ids=str)
@pytest.mark.parametrize("window", [None, 30])
def test_what_is_no_number_spoils_those_who_see_it_alone(kv_format: KVFormat, what: float, window: int | None) -> None:
    """Keys of one token, values of another: rows before them, or beyond their window, have the bits that they had."""
    shape, length, key, value = SHAPES[3], 90, 66, 70
    pool = Pool(shape, kv_format, [length, 1, 1])
    q = queries(shape, length)
    before = pool.attend(q, [(0, 0, length)], window=window)
    k, v = (random(length, shape.num_kv_heads, shape.head_dim, seed=i) for i in (0, 1))
    k[key, 0, 3], v[value, 1, 5] = what, what
    pool.write(pool.tables[0], 0, k, v)
    after = pool.attend(q, [(0, 0, length)], window=window)
    group = shape.num_heads // shape.num_kv_heads
    for head in range(shape.num_heads):
        bad = key if head < group else value
        stop = length if window is None else min(length, bad + window)
        seen, unspoilt = after[bad:stop, head], before[bad:stop, head]
        if (kv_format.keys if bad == key else kv_format.values) in ("int8", "int4"):
            assert seen.isnan().all()  # a vector with such a number has no codes
        elif bad == value:  # in its own dim alone
            others = torch.arange(shape.head_dim) != 5
            assert torch.equal(seen[:, others], unspoilt[:, others])
            assert (seen[:, 5].isnan() if what != what else seen[:, 5] == what).all()
        else:  # scores of infinity, or of less than all, which hide the token
            spoils = (q[bad:stop, head, 3] > 0) | (what != what)
            assert seen[spoils].isnan().all()
            assert seen[~spoils].isfinite().all()
        for rows in (slice(0, bad), slice(stop, length)):
            assert torch.equal(after[rows, head], before[rows, head])


@pytest.mark.parametrize("what", [float("nan"), float("inf")])
@pytest.mark.parametrize("kv_format", SAME, ids=str)
def test_a_query_that_is_no_number_spoils_its_own_row_alone(kv_format: KVFormat, what: float) -> None:
    shape = SHAPES[0]
    pool = Pool(shape, kv_format, [90, 1, 1])
    q = queries(shape, 90)
    expected = pool.attend(q, [(0, 0, 90)])
    q[40, 4, 7] = what
    given = pool.attend(q, [(0, 0, 90)])
    assert given[40, 4].isnan().all()
    expected[40, 4] = given[40, 4] = 0
    assert torch.equal(given, expected)


def test_scores_that_are_huge_stay_finite() -> None:
    shape = Shape(2, 1, 8)
    pool = Pool(shape, KVFormat("fp32", "fp32"), [SPLIT + 2, 1, 1])
    q, spans = queries(shape, 1) * 1e18, [(0, SPLIT + 1, 1)]
    assert torch.allclose(pool.attend(q, spans), pool.expected(q, spans), atol=1e-5)


# --- the border -------------------------------------------------------------------------------------------------------


def step_with(pool: Pool, **changes: object) -> PageStep:
    arguments: dict[str, object] = {
        "num_tokens": [1],
        "first_positions": [69],
        "first_numbers": [0],
        "page_tables": [pool.tables[0]],
        "turns": pool.turns(),
    }
    return native.page_step(pool.pages, pool.layout.page_bytes, **(arguments | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_tokens": [0]}, "span 0 has 0 tokens: it must have from 1 to"),
        ({"num_tokens": [1, 1]}, "must have one element for each span"),
        ({"first_positions": [-1]}, "span 0 begins at position -1"),
        ({"first_positions": [128]}, "span 0 has 2 pages from number 0 on: its tokens end at 129"),
        ({"first_numbers": [1]}, "span 0 has pages from number 1 on: it sees page 0"),
        ({"page_tables": [torch.tensor([0, 99])]}, "span 0 has page 99: the pool has 6"),
        ({"page_tables": [torch.tensor([-1, 0])]}, "span 0 has page -1: the pool has 6"),
        ({"page_tables": [torch.tensor([0.0, 1.0])]}, "a page table must have dtype int64"),
        ({"page_tables": [torch.tensor([0, 9, 1, 9])[::2]]}, "a page table has stride 2 in its last dimension"),
        ({"window": 0}, "window is 0: it must be 1 at least"),
        ({"turns": [torch.zeros(2, 2, 5, dtype=torch.float64)]}, "a table of turns must have dtype float32"),
        ({"turns": [torch.zeros(2, 3, 5)]}, "a table of turns has the shape [2, 3, 5]: it must be [2, 2, 5]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_step_says_what_is_wrong_with_it(changes: dict[str, object], message: str) -> None:
    pool = Pool(SHAPES[0], KVFormat("int8", "int8"), [70, 1, 1])
    with pytest.raises(ValueError, match=re.escape(message)):
        step_with(pool, **changes)


def test_no_slot_is_written_twice() -> None:
    pool = Pool(SHAPES[0], KVFormat("int8", "int8"), [70, 1, 1])
    table = pool.tables[0]
    with pytest.raises(ValueError, match="two tokens are written to the same slot"):
        step_with(pool, num_tokens=[3, 2], first_positions=[64, 66], first_numbers=[0, 0], page_tables=[table, table])


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        (lambda pages: pages.to(torch.int16), "pool must have dtype uint8"),
        (lambda pages: pages[0], "pool has 1 dimensions: it must have 2"),
        (lambda pages: pages[:, :64], "pool has rows of 64 bytes"),
        (lambda pages: pages[:, 1:], "pool must be aligned to 64 bytes"),
        (lambda pages: pages[:, :-1].contiguous(), "it must be a multiple of 64"),
    ],
)
def test_a_pool_must_be_one(pages: object, message: str) -> None:
    pool = Pool(SHAPES[0], KVFormat("int8", "int8"), [70, 1, 1])
    pool.pages = pages(pool.pages)  # type: ignore[operator]
    with pytest.raises(ValueError, match=message):
        step_with(pool)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 66}, "head_dim is 66: int8 takes multiples of 4"),
        ({"keys": "int7"}, "keys is 'int7': that is no storage format"),
        ({"offset": 8}, "offset is 8: it must be a multiple of 64"),
        ({"num_kv_heads": 0}, "num_kv_heads is 0: it must be from 1"),
        ({"key_offset": torch.zeros(3, 64)}, "key_offset, key_scale and key_feedback go together"),
        (
            {"key_offset": torch.zeros(3, 32), "key_scale": torch.ones(3, 64)},
            "key_offset has the shape [3, 32]: it must be [3, 64]",
        ),
        (
            {"key_offset": torch.zeros(64, 3).T, "key_scale": torch.ones(3, 64)},
            "key_offset has stride 3 in its last dimension: it must be 1",
        ),
        (
            {"keys": "bf16", "key_offset": torch.zeros(3, 64), "key_scale": torch.ones(3, 64)},
            "keys of bf16 are coded as they are",
        ),
        (
            {"keys": "int4", "key_offset": torch.zeros(3, 64), "key_scale": torch.ones(3, 64)},
            "int4 keys with an offset take key_feedback too",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_layer_says_what_is_wrong_with_it(changes: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"keys": "int8", "values": "int8", "head_dim": 64, "num_kv_heads": 3, "offset": 0}
    with pytest.raises(ValueError, match=re.escape(message)):
        native.page_layer(**(arguments | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(1, 9, 64, dtype=torch.float16)}, "q must have dtype float32 or bfloat16"),
        ({"q": torch.zeros(2, 9, 64)}, "q has the shape [2, 9, 64]: it must be [1, H, 64]"),
        ({"q": torch.zeros(1, 9, 32)}, "q has the shape [1, 9, 32]: it must be [1, H, 64]"),
        ({"q": torch.zeros(1, 10, 64)}, "q has 10 heads: it must be a multiple of the 3 KV heads"),
        ({"q": torch.zeros(1, 9, 128)[..., ::2]}, "q has stride 2 in its last dimension: it must be 1"),
        ({"q": torch.zeros(1, 9, 64).bfloat16()}, "q and out must have the same shape and dtype"),
        ({"out": torch.zeros(1, 9, 64), "q": None}, "q and out must not overlap"),
        ({"out": torch.zeros(1, 1, 64).expand(1, 9, 64)}, "out must not overlap itself"),
        ({"out": torch.zeros(1, 9, 64), "sinks": None}, "sinks and out must not overlap"),
        ({"scale": float("nan")}, "scale must be finite"),
        ({"softcap": -1.0}, "softcap must be from 1e-30 to 1e30"),
        ({"softcap": 1e31}, "softcap must be from 1e-30 to 1e30"),
        ({"softcap": 1e-31}, "softcap must be from 1e-30 to 1e30"),
        ({"softcap": math.nan}, "softcap must be from 1e-30 to 1e30"),
        ({"sinks": torch.zeros(8)}, "sinks has the shape [8]: it must be [9]"),
        ({"window": 0}, "window is 0: it must be from 1 to"),
        ({"num_threads": 0}, "num_threads is 0: it must be from 1 to 1024"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_attention_says_what_is_wrong_with_its_arguments(changes: dict[str, object], message: str) -> None:
    pool = Pool(SHAPES[0], KVFormat("int8", "int8"), [70, 1, 1])
    arguments: dict[str, object] = {
        "q": torch.zeros(1, 9, 64),
        "out": torch.zeros(1, 9, 64),
        "scale": 0.1,
        "num_threads": 1,
    } | changes
    if arguments["q"] is None:
        arguments["q"] = arguments["out"]
    if arguments.get("sinks", 0) is None:
        arguments["sinks"] = arguments["out"][0, 4, :9]  # type: ignore[index]
    with pytest.raises(ValueError, match=re.escape(message)):
        step_with(pool).attend(pool.layer(), **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["q", "out"])
def test_queries_and_results_lie_apart_from_the_pages(name: str) -> None:
    pool = Pool(SHAPES[0], KVFormat("int8", "int8"), [70, 1, 1])
    arguments = {"q": torch.zeros(1, 9, 64), "out": torch.zeros(1, 9, 64)}
    # The end of the last page, which the step does not read.
    arguments[name] = pool.pages[-1, -9 * 64 * 4 :].view(torch.float32).view(1, 9, 64)
    with pytest.raises(ValueError, match=rf"^{name} and the pool must not overlap$"):
        step_with(pool).attend(pool.layer(), **arguments, scale=1.0, num_threads=1)


def test_tables_of_turns_lie_apart_from_the_pages() -> None:
    pool = Pool(SHAPES[0], KVFormat("int8", "int8"), [70, 1, 1])
    table = pool.pages[1, : 2 * 2 * 32 * 4].view(torch.float32).view(2, 2, 32)
    with pytest.raises(ValueError, match=r"^a table of turns and the pool must not overlap$"):
        step_with(pool, turns=[table])


def test_sinks_lie_apart_from_the_result() -> None:
    pool = Pool(SHAPES[0], KVFormat("int8", "int8"), [70, 1, 1])
    q, out = torch.zeros(1, 9, 64), torch.zeros(1, 9, 64)
    with pytest.raises(ValueError, match="sinks and out must not overlap"):
        step_with(pool).attend(pool.layer(), q, out, scale=1.0, sinks=out[0, 8, -9:], num_threads=1)


def test_a_layer_must_lie_in_the_pages_of_the_step() -> None:
    pool = Pool(SHAPES[0], KVFormat("int8", "int8"), [70, 1, 1])
    q, out = torch.zeros(1, 9, 64), torch.zeros(1, 9, 64)
    beyond = native.page_layer("int8", "int8", 64, 3, pool.layout.page_bytes)
    with pytest.raises(ValueError, match="the layer ends at byte"):
        step_with(pool).attend(beyond, q, out, scale=1.0, num_threads=1)
    with pytest.raises(ValueError, match="the layer's keys are turned by table 0: this step has 0"):
        step_with(pool, turns=[]).attend(pool.layer(), q, out, scale=1.0, num_threads=1)
    with pytest.raises(ValueError, match="the layer's table of turns has 1 pages: the step has 2"):
        step_with(pool, turns=[torch.zeros(1, 2, 32)]).attend(pool.layer(), q, out, scale=1.0, num_threads=1)
    with pytest.raises(ValueError, match="the layer's table of turns has 20 planes: it must have 32"):
        step_with(pool, turns=[torch.zeros(9, 2, 20)]).attend(pool.layer(), q, out, scale=1.0, num_threads=1)


def test_a_step_of_no_tokens_does_nothing() -> None:
    pool = Pool(SHAPES[0], KVFormat("int8", "int8"), [70, 1, 1])
    step = step_with(pool, num_tokens=[], first_positions=[], first_numbers=[], page_tables=[])
    step.attend(pool.layer(), torch.zeros(0, 9, 64), torch.zeros(0, 9, 64), scale=1.0, num_threads=2)


def test_a_step_keeps_the_memory_that_it_reads() -> None:
    pool = Pool(SHAPES[0], KVFormat("int8", "int8"), [70, 1, 1])
    q = queries(SHAPES[0], 1)
    expected = pool.attend(q, [(0, 69, 1)])
    step, layer, scale = pool.step([(0, 69, 1)]), pool.layer(), pool.scale
    del pool
    overwriting = [torch.full((6, 100_000), 255, dtype=torch.uint8) for _ in range(8)]
    out = torch.empty_like(q)
    step.attend(layer, q, out, scale=scale, num_threads=1)
    assert torch.equal(out, expected)
    del overwriting


# --- instruction sets -------------------------------------------------------------------------------------------------

EVERY_FORMAT = f"""
import sys
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parent.parent)!r}]
from test_native_attention import PAIRS, SHAPES, SPANS, Pool, lengths_of, native, queries
print(native.isa())
for number, kv_format in enumerate(PAIRS):
    for shape in (SHAPES[number % 5], SHAPES[5]):
        spans = SPANS[number % len(SPANS)]
        pool, q = Pool(shape, kv_format, lengths_of(spans)), queries(shape, sum(count for *_, count in spans))
        given, expected = pool.attend(q, spans), pool.expected(q, spans)
        assert pool.is_near(given, expected), (shape, kv_format)
        for i, row in enumerate([0, len(q) - 1]):
            sequence, first, count = spans[-i]
            alone = pool.attend(q[row : row + 1], [(sequence, first + i * (count - 1), 1)], num_threads=1)
            assert alone.equal(given[row : row + 1]), (shape, kv_format)
"""


@pytest.mark.parametrize("isa", native.available_isas())
def test_every_instruction_set_does_every_format(isa: str) -> None:
    environment = os.environ | {native.MAX_ISA_VARIABLE: isa}
    result = subprocess.run(
        [sys.executable, "-c", EVERY_FORMAT], capture_output=True, text=True, env=environment, check=False
    )
    assert (result.stdout.strip(), result.stderr, result.returncode) == (isa, "", 0)
