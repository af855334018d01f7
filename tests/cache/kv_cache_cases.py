"""Caches of tokens that stand for their keys and values: what tests of the cache write and read."""

from __future__ import annotations

import torch

from key_texts import identity_statics
from kvist.cache.kv_cache import KVCache, Span
from kvist.cache.plan import CachePlan
from kvist.config import CacheConfig, LayerConfig
from kvist.kv_format import KVFormat, LayerFormats

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
