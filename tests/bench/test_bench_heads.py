"""What `kvist bench heads` measures: the same decoder with fewer KV heads, in turns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from kvist.attention import Decoder
from kvist.bench import heads_runs
from kvist.bench.heads import HeadsRow, HeadsShape, Uncached, growth, pays_from
from kvist.bench.heads_runs import measure_heads
from kvist.errors import CacheFullError, OptionError
from kvist.loading.progress import no_progress

SHAPE = HeadsShape(embed_dim=32, num_heads=4, kv_heads=(4, 2, 1), layers=2, prompt=4, new_tokens=70, batch=2)


def measured(shape: HeadsShape = SHAPE, *, no_cache: bool = False) -> list[HeadsRow]:
    return measure_heads(shape, no_cache=no_cache, progress=no_progress)[0]


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """For each call of a decoder: its KV heads, the new tokens and the tokens in its cache before."""
    calls: list[tuple[int, int, int]] = []
    hidden_states = Decoder._hidden_states

    def spy(self, token_ids, caches, positions, mask):  # type: ignore[no-untyped-def]
        before = 0 if caches is None else caches[0].length
        calls.append((self.config.num_kv_heads, token_ids.shape[1], before))
        return hidden_states(self, token_ids, caches, positions, mask)

    monkeypatch.setattr(Decoder, "_hidden_states", spy)
    return calls


def test_decoders_take_turns_and_go_on_where_they_were(computed) -> None:
    measured()
    steps = [call for call in computed if call[1] == 1 and call[2] > 4]  # the first step warms up too
    assert [heads for heads, _, _ in steps[:31]] == [4] * 31
    assert sorted(before for heads, _, before in steps if heads == 2) == list(range(5, 73))
    order = [heads for heads, _, _ in steps]
    turns = [heads for index, heads in enumerate(order) if index == 0 or order[index - 1] != heads]
    assert turns == [4, 2, 1] * 3


def test_a_cache_has_the_scalars_that_are_counted() -> None:
    rows = measured()
    assert [(row.num_kv_heads, row.kind) for row in rows] == [(4, "MHA"), (2, "GQA"), (1, "MQA")]
    for row in rows:
        assert row.cache_tokens == 70
        assert row.measured_scalars == row.counted_scalars == 2 * 2 * 70 * row.num_kv_heads * 8
        assert row.lengths == (36, 68, 73)
        assert row.new_tokens == (32, 32, 5)  # the first of 70 comes with the prompt
        assert row.cache_bytes == tuple(4 * 2 * 2 * 2 * length * row.num_kv_heads * 8 for length in row.lengths)
        assert len(row.process_bytes) == 3
        assert row.cuda_bytes is None
        assert row.tokens_per_s == pytest.approx(69 / row.total_seconds[-1])
    assert rows[0].weights_bytes > rows[1].weights_bytes > rows[2].weights_bytes


def test_the_issues_arithmetic() -> None:
    shape = replace(SHAPE, embed_dim=1024, num_heads=16, kv_heads=(16, 4, 1), new_tokens=1024, batch=1)
    assert shape.counted_length == 1024
    assert [shape.cache_scalars(k, 1024) for k in shape.kv_heads] == [2_097_152, 524_288, 131_072]


@pytest.mark.parametrize(("prompt", "new_tokens", "counted"), [(1, 2, 2), (4, 70, 70), (9, 9, 17), (50, 3, 52)])
def test_scalars_are_counted_at_a_length_that_the_cache_comes_to(prompt: int, new_tokens: int, counted: int) -> None:
    (row,) = measured(replace(SHAPE, kv_heads=(2,), prompt=prompt, new_tokens=new_tokens))
    assert row.cache_tokens == counted
    assert row.measured_scalars == row.counted_scalars == 2 * 2 * counted * 2 * 8


def test_without_a_cache_the_whole_text_is_computed_for_a_token(computed) -> None:
    rows = measured(no_cache=True)
    uncached = rows[0].uncached
    assert uncached is not None
    assert (uncached.lengths[0], uncached.lengths[-1], len(uncached.lengths)) == (4, 73, 16)
    assert (uncached.repetitions, uncached.generated_lengths) == (3, 70)
    assert [call for call in computed if call[2] == 0][-3 * 3 * 16 :] == [
        (heads, length, 0) for length in uncached.lengths for _ in range(3) for heads in (4, 2, 1)
    ]
    assert measured()[0].uncached is None


def test_a_length_without_a_cache_counts_as_its_median(monkeypatch: pytest.MonkeyPatch) -> None:
    ms = iter([9.0, 1.0, 2.0, 4.0, 3.0, 80.0])
    monkeypatch.setattr(heads_runs._Run, "uncached_step", lambda run, length: next(ms))
    (row,) = measured(replace(SHAPE, kv_heads=(2,), new_tokens=2), no_cache=True)
    assert row.uncached is not None
    assert (row.uncached.lengths, row.uncached.ms_per_token) == ((4, 5), (2.0, 4.0))
    assert row.uncached.total_seconds == (0, 0.003)


@pytest.mark.parametrize(("new_tokens", "timed"), [(2, 2), (15, 15), (16, 16), (17, 16), (1024, 16)])
def test_lengths_without_a_cache_are_few_and_spread_evenly(new_tokens: int, timed: int) -> None:
    lengths = replace(SHAPE, new_tokens=new_tokens).uncached_lengths
    assert (len(lengths), lengths[0], lengths[-1]) == (timed, 4, 3 + new_tokens)
    gaps = {after - before for before, after in pairwise(lengths)}
    assert max(gaps) - min(gaps) <= 1


def test_process_memory_grows_by_the_cache() -> None:
    """In a process of its own, whose heap has no holes of other tests."""
    shape = {
        "embed-dim": 256,
        "num-heads": 4,
        "kv-heads": "4,1",
        "layers": 2,
        "prompt": 1,
        "new-tokens": 128,
        "batch": 64,
    }
    options = [f"--{name}={value}" for name, value in shape.items()]
    command = [sys.executable, "-m", "kvist", "bench", "heads", *options, "--threads=1", "--json=-"]
    # Where AddressSanitizer is at work, it must not keep what was freed: that is what is counted.
    environment = os.environ | {"ASAN_OPTIONS": f"{os.environ.get('ASAN_OPTIONS', '')}:quarantine_size_mb=1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    many, one = json.loads(done.stdout)["rows"]
    assert many["cache_bytes"][-1] == 4 * 64 * 2 * 2 * 128 * 256
    assert 0.7 < many["process_bytes"][-1] / many["cache_bytes"][-1] < 1.6
    assert one["process_bytes"][-1] < many["process_bytes"][-1] / 2


def row_of(ms_per_token: list[float]) -> HeadsRow:
    turns = len(ms_per_token)
    lengths = tuple(32 * (index + 1) for index in range(turns))
    return HeadsRow(
        1, "MQA", 1, 1.0, lengths, tuple(ms_per_token), (32,) * turns, 32, 1, 1, lengths, lengths, None, None
    )  # fmt: skip


@pytest.mark.parametrize(
    ("ms_per_token", "expected"),
    [([9.0, 9.0, 9.0], 32), ([9.6, 9.4, 9.0], 64), ([9.0, 9.9, 9.0], 96), ([9.0, 9.0, 9.9], None), ([9.5] * 3, 32)],
)
def test_sharing_pays_from_where_it_stays_faster(ms_per_token: list[float], expected: int | None) -> None:
    assert pays_from(row_of(ms_per_token), row_of([10.0, 10.0, 10.0])) == expected


def test_growth_tells_linear_from_quadratic() -> None:
    lengths = list(range(32, 1025, 32))
    assert growth(lengths, [0.02 * n for n in lengths]) == pytest.approx(1)
    assert growth(lengths, [0.02 * n * n for n in lengths]) == pytest.approx(2)
    assert growth([32], [1.0]) is None
    constant, rising = (
        Uncached((0, 500, 1000), ms, repetitions=3, generated_lengths=1001) for ms in ((2.0,) * 3, (0.0, 500.0, 1000.0))
    )
    assert constant.total_seconds == pytest.approx((0, 1, 2))
    assert rising.total_seconds == pytest.approx((0, 125, 500))
    assert growth(rising.lengths[1:], rising.total_seconds[1:]) == pytest.approx(2)


def test_time_is_the_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(10_000))
    monkeypatch.setattr(heads_runs.time, "perf_counter", lambda: float(next(seconds)))
    (row,) = measured(replace(SHAPE, kv_heads=(2,)))
    assert row.ms_per_token == (1000.0,) * 3
    assert row.total_seconds == (32, 64, 69)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device: its memory is not measured here")
def test_memory_on_cuda_is_the_caches() -> None:
    rows, _ = measure_heads(replace(SHAPE, new_tokens=400), no_cache=True, device="cuda", progress=no_progress)
    for row in rows:
        assert row.cuda_bytes is not None
        assert row.cuda_bytes[-1] >= row.cache_bytes[-1] - row.cache_bytes[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_heads": (4, 3)}, r"^num_kv_heads is 3: it must divide the 4 query heads: choose 1, 2 or 4$"),
        ({"new_tokens": 1}, r"^new_tokens is 1: it must be at least 2, since the first comes with the prompt$"),
        ({"prompt": 0}, r"^prompt is 0"),
        ({"num_heads": 5, "kv_heads": (1,)}, r"^embed_dim 32 does not divide by 5 heads"),
        ({"num_heads": 32, "kv_heads": (1,)}, r"^heads of 1 dims cannot be turned by rope"),
    ],
)
def test_what_cannot_be_measured_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        replace(SHAPE, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("meta", r"^the device meta cannot be used: the clock is right on cpu and cuda alone, give one of them$"),
        ("tpu9", r"^the device tpu9 cannot be used: "),
        ("cuda:99", r"^the device cuda:99 cannot be used: "),
    ],
)
def test_a_device_that_the_clock_does_not_wait_for_is_refused(device: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        measure_heads(SHAPE, no_cache=False, device=device, progress=no_progress)


def test_what_does_not_fit_in_memory_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads_runs, "available_bytes", lambda: 1 << 20)
    with pytest.raises(
        CacheFullError, match=r"^3 decoders and their caches take \d+\.\d MiB, and 1\.0 MiB are free: ask"
    ):
        measured(replace(SHAPE, layers=40))
