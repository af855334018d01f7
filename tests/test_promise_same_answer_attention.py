"""Promise 1, for the attention: a token's result has the same bits, however its context came into the cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import pytest
import torch

from key_texts import statics_of
from kvist.attention.attend import attend
from kvist.cache.kv_cache import KVCache, Span
from kvist.config import CacheConfig, LayerConfig
from kvist.kernels.key_statics import KeyStatics
from kvist.kv_format import KV_FORMATS, KVFormat, LayerFormats


@dataclass(frozen=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Case:
    """A shape in a format, over pages for native kernels or for those in PyTorch."""

    shape: Shape
    kv_format: KVFormat
    native: bool = True

    def __str__(self) -> str:
        shape, kernel = self.shape, "" if self.native else " torch"
        return f"{shape.num_heads}x{shape.num_kv_heads}x{shape.head_dim} {self.kv_format}{kernel}"


SMOLLM2, GEMMA = Shape(9, 3, 64), Shape(4, 1, 256)
FORMATS = [*(KVFormat(name, name) for name in KV_FORMATS), KVFormat("int8", "int4")]
CASES = [
    *(Case(SMOLLM2, kv_format) for kv_format in FORMATS),
    *(Case(shape, FORMATS[0]) for shape in (GEMMA, Shape(4, 4, 80), Shape(4, 2, 96), Shape(8, 1, 128), Shape(4, 2, 8))),
    Case(GEMMA, FORMATS[-1]),
    # Odd and even numbers of groups, and queries of fewer bits.
    *(Case(shape, KVFormat("int4", "int4")) for shape in (Shape(4, 2, 96), Shape(8, 1, 128))),
    Case(Shape(6, 1, 520), KVFormat("int8", "int8")),
    Case(SMOLLM2, KVFormat("int8", "int4"), native=False),
    Case(Shape(4, 1, 16), KVFormat("bf16", "bf16"), native=False),
]
WINDOW = 70
WINDOWS = (None, WINDOW, 1)
LENGTH = 333


class Text:
    """Random queries, keys and values of one sequence, and a cache of one layer for each window."""

    def __init__(self, case: Case, length: int = LENGTH, seed: int = 0) -> None:
        shape = case.shape
        self.case, self.shape, self.length = case, shape, length
        self.layers = [LayerConfig(shape.num_kv_heads, shape.head_dim, window) for window in WINDOWS]
        self.cache = KVCache(
            self.layers,
            CacheConfig(LayerFormats(case.kv_format), 1 << 28),
            key_statics=[_statics(shape)] * len(self.layers),
            native=case.native,
        )
        self.q, self.k, self.v = self.random(length, seed)

    def random(self, length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        heads = (self.shape.num_heads, self.shape.num_kv_heads, self.shape.num_kv_heads)
        q, k, v = (torch.randn(length, count, self.shape.head_dim, generator=generator) for count in heads)
        return q, k, v

    def step(self, *runs: tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
        """One step over new tokens of some sequences; for each sequence `[layers, tokens, H, D]`."""
        spans = [Span(sequence, len(q)) for sequence, q, _, _ in runs]
        for span in spans:
            assert self.cache.reserve(span.sequence_id, self.cache.length(span.sequence_id) + span.num_tokens)
        view = self.cache.view(spans)
        q, k, v = (torch.cat(parts) for parts in list(zip(*runs, strict=True))[1:])
        mixed = []
        for index in range(len(self.layers)):
            view.write(index, k, v)
            mixed.append(attend(q, view, index, scale=self.shape.head_dim**-0.5))
        self.cache.commit(view)
        return list(torch.stack(mixed).split([span.num_tokens for span in spans], dim=1))

    def part(self, sequence: int, stop: int) -> tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]:
        """This text's tokens from where a sequence is up to `stop`."""
        rows = slice(self.cache.length(sequence), stop)
        return sequence, self.q[rows], self.k[rows], self.v[rows]

    def cold(self) -> torch.Tensor:
        """All tokens in one step."""
        return self.step(self.part(self.cache.open(), self.length))[0]

    def chunked(self, size: int, sequence: int | None = None, stop: int | None = None) -> torch.Tensor:
        """All tokens, or those up to `stop` that a sequence has not, so many in a step."""
        sequence = self.cache.open() if sequence is None else sequence
        stop = self.length if stop is None else stop
        stops = [*range(self.cache.length(sequence) + size, stop, size), stop]
        return torch.cat([self.step(self.part(sequence, each))[0] for each in stops], dim=1)


@cache
def _statics(shape: Shape) -> KeyStatics:
    return statics_of(shape.head_dim, shape.num_kv_heads)


@pytest.fixture(params=CASES, ids=str)
def text(request: pytest.FixtureRequest) -> Text:
    return Text(request.param)


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def alone() -> dict[Case, torch.Tensor]:
    """What each text gives cold, on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    results = {case: Text(case).cold() for case in CASES}
    torch.set_num_threads(before)
    return results


@pytest.fixture
def expected(text: Text, alone: dict[Case, torch.Tensor]) -> torch.Tensor:
    return alone[text.case]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_any_number_of_threads_gives_the_same(text: Text, expected: torch.Tensor, count: int) -> None:
    torch.set_num_threads(count)
    assert expected.isfinite().all()
    assert torch.equal(text.cold(), expected)


@pytest.mark.parametrize("size", [63, 64, 65, 200, 257])
def test_chunks_give_the_same(text: Text, expected: torch.Tensor, size: int) -> None:
    assert torch.equal(text.chunked(size), expected)


def test_decoding_gives_the_same(text: Text, expected: torch.Tensor) -> None:
    """Token by token around every border: of a tile, a page, the window, a split."""
    sequence, start = text.cache.open(), 0
    for stop in (3, 6, 60, 75, 250, 262, LENGTH):
        decoded = stop - start < 20
        result = text.chunked(1 if decoded else stop - start, sequence, stop)
        assert torch.equal(result, expected[:, start:stop])
        start = stop


def test_strangers_in_the_batch_change_nothing(text: Text, expected: torch.Tensor) -> None:
    """Not even those whose keys and values are infinite or no numbers."""
    ours, long, short, broken = (text.cache.open() for _ in range(4))
    results, step = [], 0
    while (length := text.cache.length(ours)) < LENGTH:
        stop = min(LENGTH, length + (1, 40, 90)[step % 3])
        q, k, v = text.random(5, seed=step)
        k[1:3], v[2:4] = torch.inf, torch.nan
        strangers = [
            (long, *text.random(70, seed=100 + step)),
            (short, *text.random(1, seed=200 + step)),
            (broken, q, k, v),
        ]
        runs = [*strangers[: step % 4], text.part(ours, stop), *strangers[step % 4 :]]
        results.append(text.step(*runs)[step % 4 if step % 4 < 3 else 3])
        step += 1
    assert torch.equal(torch.cat(results, dim=1), expected)


@pytest.mark.parametrize("length", [64, 100, 256])
def test_a_fork_gives_the_same(text: Text, expected: torch.Tensor, length: int) -> None:
    trunk = text.cache.open()
    text.chunked(length, trunk, length)
    fork = text.cache.fork(trunk)
    text.step((trunk, *text.random(20, seed=7)))  # the trunk goes another way
    assert torch.equal(text.chunked(90, fork), expected[:, length:])


def test_a_rewound_sequence_gives_the_same(text: Text, expected: torch.Tensor) -> None:
    sequence = text.cache.open()
    text.chunked(100, sequence, 200)
    text.step((sequence, *text.random(30, seed=8)))
    kept = text.cache.rewind(sequence, 190)
    assert kept == 190
    assert torch.equal(text.chunked(77, sequence), expected[:, kept:])


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, 3e38])
@pytest.mark.parametrize("side", ["keys", "values"])
def test_a_later_token_that_is_no_number_changes_nothing(
    text: Text, expected: torch.Tensor, side: str, broken: float
) -> None:
    """Computed in the same step, and seen by the tokens after it alone."""
    for position in (30, 300):
        vectors = text.k if side == "keys" else text.v
        kept = vectors[position].clone()
        vectors[position] = broken
        result = text.cold()
        assert torch.equal(result[:, :position], expected[:, :position])
        decoded = torch.cat(
            [text.chunked(position + 1, stop=position + 1), torch.empty(3, 0, *result.shape[2:])], dim=1
        )
        assert torch.equal(decoded.nan_to_num(7), result[:, : position + 1].nan_to_num(7))
        vectors[position] = kept
