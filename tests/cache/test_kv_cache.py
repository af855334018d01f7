"""The cache's surface: room, views, rewinding, the budget."""

from __future__ import annotations

import pytest
import torch

from kvist.cache.kv_cache import KVCache, Span, kv_bytes_per_token
from kvist.config import CacheConfig, LayerConfig, parse_bytes
from kvist.errors import CacheFullError, OptionError

LAYERS = (LayerConfig(2, 8, None), LayerConfig(1, 16, 4))
BYTES = (2 * 2 * 8 + 2 * 16) * 4


def cache_of(num_tokens: int, kv_format: str = "fp32") -> KVCache:
    return KVCache(LAYERS, CacheConfig(kv_format, num_tokens * kv_bytes_per_token(LAYERS, kv_format)))


def append(cache: KVCache, sequence: int, keys: torch.Tensor) -> None:
    """Append tokens whose keys in the first layer are `keys` `[T, 2, 8]`, values the negative."""
    view = cache.view([Span(sequence, len(keys))])
    view.write(0, keys, -keys)
    view.write(1, keys.reshape(-1, 1, 16), -keys.reshape(-1, 1, 16))
    cache.commit(view)


def first_layer(cache: KVCache, sequence: int) -> torch.Tensor:
    """The keys held of the first layer, `[L, 2, 8]`, checked against its values."""
    view = cache.view([Span(sequence, 0)])
    keys, values = view.read(0, 0)
    assert torch.equal(values, -keys)
    return keys.transpose(0, 1)


def test_bytes_per_token_count_keys_and_values_of_all_layers() -> None:
    assert kv_bytes_per_token(LAYERS, "fp32") == BYTES
    assert kv_bytes_per_token(LAYERS, "bf16") == BYTES // 2


def test_what_is_written_is_read_over_growth() -> None:
    cache = cache_of(1000)
    one, other = cache.open(), cache.open()
    keys = torch.randn(300, 2, 8)
    for start in range(0, 300, 7):
        chunk = keys[start : start + 7]
        for sequence, sign in ((one, 1), (other, 2)):
            assert cache.reserve(sequence, start + len(chunk))
            append(cache, sequence, chunk * sign)
    assert torch.equal(first_layer(cache, one), keys)
    assert torch.equal(first_layer(cache, other), 2 * keys)


def test_growing_token_by_token_copies_seldom() -> None:
    cache = cache_of(10_000)
    sequence = cache.open()
    capacities = set()
    for length in range(1, 5001):
        assert cache.reserve(sequence, length)
        capacities.add(cache.used_bytes)
    assert len(capacities) < 16


def test_a_step_that_is_not_committed_leaves_the_sequence_as_it_was() -> None:
    cache = cache_of(100)
    sequence = cache.open()
    cache.reserve(sequence, 50)
    keys = torch.randn(10, 2, 8)
    append(cache, sequence, keys)
    failed = cache.view([Span(sequence, 5)])
    failed.write(0, torch.full((5, 2, 8), torch.nan), torch.full((5, 2, 8), torch.nan))
    assert cache.length(sequence) == 10
    more = torch.randn(5, 2, 8)
    append(cache, sequence, more)
    assert torch.equal(first_layer(cache, sequence), torch.cat((keys, more)))


def test_rewinding_and_writing_again() -> None:
    cache = cache_of(100)
    sequence = cache.open()
    cache.reserve(sequence, 50)
    keys = torch.randn(10, 2, 8)
    append(cache, sequence, keys)
    cache.rewind(sequence, 4)
    append(cache, sequence, 3 * keys[:2])
    assert torch.equal(first_layer(cache, sequence), torch.cat((keys[:4], 3 * keys[:2])))
    with pytest.raises(CacheFullError, match="cannot rewind to 7: the sequence holds 6"):
        cache.rewind(sequence, 7)


def test_the_budget_bounds_all_sequences_together() -> None:
    cache = cache_of(100)
    one, other = cache.open(), cache.open()
    assert cache.reserve(one, 60)
    assert not cache.reserve(other, 41)
    assert cache.used_bytes == 60 * BYTES
    assert cache.reserve(other, 40)
    assert not cache.reserve(one, 61)
    cache.release(other)
    assert cache.reserve(one, 100)
    cache.release(one)
    assert cache.used_bytes == 0


def test_positions_are_those_of_each_sequence() -> None:
    cache = cache_of(100)
    one, other = cache.open(), cache.open()
    cache.reserve(one, 20)
    cache.reserve(other, 20)
    append(cache, one, torch.randn(5, 2, 8))
    view = cache.view([Span(other, 3), Span(one, 2)])
    assert view.positions().tolist() == [0, 1, 2, 5, 6]
    assert view.row_starts == (0, 3)


def test_misuse_is_refused() -> None:
    cache = cache_of(100)
    sequence = cache.open()
    with pytest.raises(ValueError, match="no room reserved"):
        cache.view([Span(sequence, 1)])
    cache.reserve(sequence, 10)
    with pytest.raises(ValueError, match="twice"):
        cache.view([Span(sequence, 1), Span(sequence, 1)])
    cache.release(sequence)
    with pytest.raises(KeyError, match="not open"):
        cache.reserve(sequence, 1)


def test_formats_and_sizes_are_checked() -> None:
    with pytest.raises(OptionError, match="unknown kv_format 'bf61': did you mean 'bf16'"):
        CacheConfig("bf61", 1)
    with pytest.raises(OptionError, match="positive"):
        CacheConfig("bf16", 0)


@pytest.mark.parametrize(
    ("text", "size"), [("512MiB", 512 * 2**20), ("2GB", 2 * 10**9), ("1.5 KiB", 1536), ("7", 7), (4096, 4096)]
)
def test_sizes_are_read(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "-1", "0", "1 parsec", "MiB", "1e9", "nan", "0.1"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="is not a size in bytes"):
        parse_bytes(text)
