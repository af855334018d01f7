from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kvist.bench import attention as bench
from kvist.bench.attention import AttentionShape, FilledCache, torch_forms
from kvist.cache.cache_view import CacheView
from kvist.cache.kv_cache import KVCache, Span
from kvist.errors import CacheFullError, OptionError
from kvist.kv_format import LayerFormats

SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=64, context=130, batch=2, layers=3)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, int]]]:
    """The first position and tokens of each span of every step."""
    seen: list[list[tuple[int, int]]] = []
    view = KVCache.view

    def spy(cache: KVCache, spans: Sequence[Span]) -> CacheView:
        made = view(cache, spans)
        seen.append([(first, span.num_tokens) for first, span in zip(made.first_positions, spans, strict=True)])
        return made

    monkeypatch.setattr(KVCache, "view", spy)
    return seen


@pytest.mark.parametrize("name", ["bf16", "int8", "k=int8,v=int4"])
def test_decode_reads_the_whole_context_of_every_sequence_in_every_layer(steps, name: str) -> None:
    cache = FilledCache(SHAPE, LayerFormats.parse(name))
    for _ in range(2):
        steps.clear()
        assert cache.decode().seconds > 0
        assert steps == [[(129, 1), (129, 1)]]
        view = cache._cache.view([Span(sequence, 0) for sequence in cache._sequences])
        for layer, mixed in enumerate(cache.mixed):
            k, v = (torch.stack(parts) for parts in zip(*(read_all(view, layer, i) for i in range(2)), strict=True))
            expected = scaled_dot_product_attention(cache._q[:2, :, None].float(), k, v, enable_gqa=True)
            torch.testing.assert_close(mixed.float(), expected[:, :, 0], atol=2e-2, rtol=2e-2)


def read_all(view: CacheView, layer: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values `[K, context, D]` of a sequence."""
    return view.read_split(layer, index, 0, SHAPE.context)


def test_forks_share_all_pages_but_the_last_and_give_the_same() -> None:
    int8 = LayerFormats.parse("int8")
    apart, shared = FilledCache(replace(SHAPE, batch=1), int8), FilledCache(replace(SHAPE, batch=4), int8, shares=True)
    apart.decode()
    for _ in range(2):
        shared.decode()
        assert torch.equal(shared.mixed[:, :1], apart.mixed)
    assert [pool.pages_in_use for pool in (group.pool for group in shared._cache.groups)] == [2 + 4]


def test_prefill_takes_the_context_in_steps(steps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_MAX_STEP_TOKENS", 100)
    cache = FilledCache(replace(SHAPE, batch=1, layers=1), LayerFormats.parse("int8"))
    steps.clear()
    cache.prefill()
    assert steps == [[(0, 100)], [(100, 30)]]


@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
def test_each_repetition_of_prefill_attends_over_random_keys_and_values(name: str, monkeypatch) -> None:
    monkeypatch.setattr(bench, "_MAX_STEP_TOKENS", 100)
    shape = replace(SHAPE, batch=1)
    cache, exact = (FilledCache(shape, LayerFormats.parse(n), dtype=torch.float32) for n in (name, "fp32"))
    for _ in range(2):
        cache.prefill()
        exact.prefill()
        assert exact.mixed.std() > 0.05
        error = (cache.mixed - exact.mixed).square().mean() / exact.mixed.square().mean()
        assert error < {"bf16": 1e-5, "int8": 2e-4, "int4": 0.03}[name]


def test_the_operations_are_those_of_the_causal_products() -> None:
    assert replace(SHAPE, context=3, batch=1, layers=1).prefill_flop == (1 + 2 + 3) * 4 * 64 * 4


def test_the_forms_of_pytorch_compute_the_same() -> None:
    given = {name: form().flatten().float() for name, form in torch_forms(SHAPE)}
    assert list(given) == ["enable_gqa", "grouped queries", "product, softmax, product"]
    first = given["enable_gqa"]
    assert first.std() > 0.01
    assert all(torch.allclose(first, other, atol=5e-3) for other in given.values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 3}, "kv_heads is 3: it must divide the 4 query heads"),
        ({"context": 0}, "context is 0: it must be at least 1"),
        ({"layers": -1}, "layers is -1: it must be from 1 to 10000"),
    ],
)
def test_shapes_that_cannot_be_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        replace(SHAPE, **changes)


def test_more_than_the_memory_is_refused() -> None:
    with pytest.raises(CacheFullError, match="lower context, batch, layers or heads"):
        FilledCache(replace(SHAPE, context=10**9), LayerFormats.parse("bf16"))
