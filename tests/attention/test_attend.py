"""Attention over a cache: natively and in PyTorch the same within rounding, and with the same refusals."""

from __future__ import annotations

import pytest
import torch

from key_texts import random, statics_of
from kvist.attention.attend import attend
from kvist.cache.cache_view import CacheView
from kvist.cache.kv_cache import KVCache, Span
from kvist.config import CacheConfig, LayerConfig
from kvist.errors import SequenceError
from kvist.kv_format import KVFormat, LayerFormats

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 6, 2, 64
LAYERS = [LayerConfig(NUM_KV_HEADS, HEAD_DIM, window) for window in (None, 70, 1)]
STEPS = [[300, 3, 0], [1, 1, 64], [5, 0, 1], [40, 300, 7]]

# Of results that reach about 4: what codes of queries and weights may cost.
TOLERANCES = {"fp32": 5e-6, "bf16": 5e-6, "int8": 0.005, "int4": 0.08}


def cache_of(kv_format: KVFormat, *, native: bool) -> KVCache:
    config = CacheConfig(LayerFormats(kv_format), 1 << 26)
    return KVCache(LAYERS, config, key_statics=[statics_of(HEAD_DIM, NUM_KV_HEADS)] * len(LAYERS), native=native)


def attended(cache: KVCache, **options: object) -> list[torch.Tensor]:
    """Steps of three sequences, attended by every layer; the same random queries, keys and values for every cache."""
    sequences, mixed = [cache.open() for _ in STEPS[0]], []
    for number, counts in enumerate(STEPS):
        view = filled_view(cache, sequences, counts, seed=10 * number)
        q = random(view.num_tokens, NUM_HEADS, HEAD_DIM, seed=10 * number + 2)
        for layer in range(len(LAYERS)):
            mixed.append(attend(q, view, layer, scale=HEAD_DIM**-0.5, **options))  # type: ignore[arg-type]
        cache.commit(view)
    return mixed


def filled_view(cache: KVCache, sequences: list[int], counts: list[int], seed: int = 0) -> CacheView:
    for sequence, count in zip(sequences, counts, strict=True):
        assert cache.reserve(sequence, cache.length(sequence) + count)
    view = cache.view([Span(sequence, count) for sequence, count in zip(sequences, counts, strict=True)])
    for layer in range(len(LAYERS)):
        k, v = (random(view.num_tokens, NUM_KV_HEADS, HEAD_DIM, seed=seed + side) for side in range(2))
        view.write(layer, k, v)
    return view


OPTIONS = {
    "plain": {},
    "softcap": {"softcap": 2.5},
    "sinks": {"sinks": torch.linspace(-3, 4, NUM_HEADS)},
    "both": {"softcap": 0.7, "sinks": torch.linspace(-3, 4, NUM_HEADS).bfloat16()},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("names", [("fp32", "fp32"), ("bf16", "bf16"), ("int8", "int8"), ("int4", "bf16")])
def test_native_and_pytorch_attention_agree(names: tuple[str, str], options: dict[str, object]) -> None:
    kv_format = KVFormat(*names)
    given, expected = (attended(cache_of(kv_format, native=native), **options) for native in (True, False))
    for one, other in zip(given, expected, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one, other, rtol=0, atol=max(TOLERANCES[name] for name in names))


@pytest.mark.parametrize("native", [True, False])
def test_soft_capping_and_sinks_are_not_passed_over(native: bool) -> None:
    cache = cache_of(KVFormat("fp32", "fp32"), native=native)
    plain, *others = (attended(cache, **options)[0] for options in OPTIONS.values())
    assert all((other - plain).abs().max() > 0.1 for other in others)


@pytest.mark.parametrize("native", [True, False])
def test_what_is_not_of_the_layers_shape_is_refused_by_both(native: bool) -> None:
    cache = cache_of(KVFormat("bf16", "bf16"), native=native)
    view = filled_view(cache, [cache.open()], [5])
    q = torch.zeros(5, NUM_HEADS, HEAD_DIM)
    for wrong in (q[:3], q[..., :32], q[:, :5], q[:, :0], q[0], q.unsqueeze(0)):
        with pytest.raises(ValueError, match=r"^layer 1 takes queries \(5, a multiple of 2, 64\), not \(.*\)$"):
            attend(wrong, view, 1, scale=1.0)
    with pytest.raises(ValueError, match=r"^sinks are \(5,\): there must be one for each of 6 query heads$"):
        attend(q, view, 1, scale=1.0, sinks=torch.zeros(5))
    for softcap in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=r"^softcap is .*: it must be from 1e-30 to 1e30$"):
            attend(q, view, 1, scale=1.0, softcap=softcap)
    with pytest.raises(ValueError, match="layer 3 is not in this cache: it has 3, from 0 on"):
        attend(q, view, 3, scale=1.0)
    assert attend(q[:, :4], view, 1, scale=1.0).shape == (5, 4, HEAD_DIM)  # two heads to each KV head
    cache.commit(view)
    with pytest.raises(SequenceError, match="since this view was made"):
        attend(q, view, 1, scale=1.0)


@pytest.mark.parametrize("native", [True, False])
def test_a_step_without_tokens_gives_nothing(native: bool) -> None:
    cache = cache_of(KVFormat("bf16", "bf16"), native=native)
    sequences = [cache.open()]
    cache.commit(filled_view(cache, sequences, [64]))
    for spans in ([], [Span(sequences[0], 0)]):
        assert attend(torch.zeros(0, NUM_HEADS, HEAD_DIM), cache.view(spans), 0, scale=1.0).shape == (0, 6, 64)
