"""What a cache writes with the native library is what it writes without."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from key_texts import identity_statics, random, statics_of
from kvist.cache.cache_view import Span
from kvist.cache.kv_cache import KVCache
from kvist.config import CacheConfig, LayerConfig
from kvist.kv_format import KV_FORMATS, KVFormat, LayerFormats

WINDOW = 70


def cache_of(name: str, *, native: bool) -> KVCache:
    """Two layer groups; layers with statics that do something and with others, of different frequencies."""
    layers = [LayerConfig(2, 64, None), LayerConfig(2, 64, WINDOW), LayerConfig(2, 64, None)]
    other = dataclasses.replace(statics_of(64), frequencies=statics_of(64).frequencies * 0.5)
    statics = [statics_of(64), *identity_statics(layers[1:2]), other] if name in ("int8", "int4") else None
    config = CacheConfig(LayerFormats(KVFormat(name, name)), 1 << 24, rewind_slack_tokens=0)
    return KVCache(layers, config, key_statics=statics, native=native)


def fill(cache: KVCache, rows: torch.Tensor, steps: list[list[int]]) -> None:
    """Steps of two sequences, written by all layers."""
    ids = [cache.open(), cache.open()]
    row = 0
    for counts in steps:
        for sequence_id, count in zip(ids, counts, strict=True):
            assert cache.reserve(sequence_id, cache.length(sequence_id) + count)
        view = cache.view([Span(sequence_id, count) for sequence_id, count in zip(ids, counts, strict=True)])
        x = rows[row : row + sum(counts)]
        row += sum(counts)
        for layer in range(3):
            view.write(layer, x + layer, x - layer)
        cache.commit(view)


@pytest.mark.parametrize("name", KV_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_cache_writes_the_same_bytes_with_the_native_library(name: str, dtype: torch.dtype) -> None:
    steps = [[100, 3], [1, 1], [0, 130], [64, 0], [1, 1], [90, 33]]
    x = random(sum(map(sum, steps)), 2, 64).to(dtype)
    with_native, without = cache_of(name, native=True), cache_of(name, native=False)
    for cache in (with_native, without):
        fill(cache, x, steps)
    for one, other in zip(with_native.groups, without.groups, strict=True):
        used = one.pool.pages_in_use
        assert used == other.pool.pages_in_use > 0
        # The lowest pages are taken first.
        assert torch.equal(one.pool.pages[: used + 2], other.pool.pages[: used + 2])


def test_vectors_whose_dims_lie_apart_are_written() -> None:
    caches = [cache_of("int4", native=True), cache_of("int4", native=True)]
    spread = torch.empty(200, 2, 64).permute(0, 2, 1).contiguous().permute(0, 2, 1)
    spread.copy_(random(200, 2, 64))
    assert spread.stride(-1) != 1
    for cache, x in zip(caches, (spread, spread.contiguous()), strict=True):
        fill(cache, x, [[150, 50]])
    for one, other in zip(caches[0].groups, caches[1].groups, strict=True):
        assert torch.equal(one.pool.pages[:6], other.pool.pages[:6])
