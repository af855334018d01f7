from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kvist.bench import attention as bench
from kvist.bench.attention import AttentionShape, FilledCache, peak_flop_per_s, torch_forms
from kvist.cache.cache_view import CacheView
from kvist.errors import CacheFullError, OptionError
from kvist.kv_format import LayerFormats

SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=64, context=130, batch=2, layers=3)


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[tuple[int, int]], torch.Tensor]]:
    """For each call of `attend`: the layer, first position and tokens of each span, and what came of it."""
    calls: list[tuple[int, list[tuple[int, int]], torch.Tensor]] = []
    attend: Callable[..., torch.Tensor] = bench.attend

    def spy(q: torch.Tensor, view: CacheView, layer: int, **named: object) -> torch.Tensor:
        mixed = attend(q, view, layer, **named)
        spans = [(first, span.num_tokens) for first, span in zip(view.first_positions, view.spans, strict=True)]
        calls.append((layer, spans, mixed))
        return mixed

    monkeypatch.setattr(bench, "attend", spy)
    return calls


@pytest.mark.parametrize("name", ["bf16", "int8", "k=int8,v=int4"])
def test_decode_reads_the_whole_context_of_every_sequence_in_every_layer(attended, name: str) -> None:
    cache = FilledCache(SHAPE, LayerFormats.parse(name))
    for _ in range(2):
        attended.clear()
        cache.decode()
        assert [(layer, spans) for layer, spans, _ in attended] == [(i, [(129, 1), (129, 1)]) for i in range(3)]
        assert all(mixed.isfinite().all() for _, _, mixed in attended)
        different = [mixed for _, _, mixed in attended]  # layers have memory of their own
        assert not torch.equal(different[0], different[1])


def test_forks_share_all_pages_but_the_last_and_give_the_same(attended) -> None:
    int8 = LayerFormats.parse("int8")
    apart, shared = FilledCache(replace(SHAPE, batch=1), int8), FilledCache(replace(SHAPE, batch=4), int8, shares=True)
    apart.decode()
    expected = [mixed for _, _, mixed in attended]
    for _ in range(2):
        attended.clear()
        shared.decode()
        assert all(torch.equal(mixed[:1], one) for (_, _, mixed), one in zip(attended, expected, strict=True))
    assert [pool.pages_in_use for pool in (group.pool for group in shared._cache.groups)] == [2 + 4]


def test_prefill_takes_the_context_in_steps(attended, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_MAX_STEP_TOKENS", 100)
    FilledCache(replace(SHAPE, batch=1, layers=1), LayerFormats.parse("int8")).prefill()
    assert [spans for _, spans, _ in attended] == [[(0, 100)], [(100, 30)]]


def test_the_operations_are_those_of_the_causal_products() -> None:
    assert replace(SHAPE, context=3, batch=1, layers=1).prefill_flop == (1 + 2 + 3) * 4 * 64 * 4


def test_the_forms_of_pytorch_compute_the_same() -> None:
    given = {name: form().flatten().float() for name, form in torch_forms(SHAPE)}
    assert list(given) == ["enable_gqa", "grouped queries", "product, softmax, product"]
    first = given["enable_gqa"]
    assert first.std() > 0.01
    assert all(torch.allclose(first, other, atol=5e-3) for other in given.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_products_have_a_peak(dtype: torch.dtype) -> None:
    assert peak_flop_per_s(dtype) > 1e8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 3}, "kv_heads is 3: it must divide the 4 query heads"),
        ({"context": 0}, "context is 0: it must be at least 1"),
        ({"layers": -1}, "layers is -1: it must be at least 1"),
    ],
)
def test_shapes_that_cannot_be_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        replace(SHAPE, **changes)


def test_more_than_the_memory_is_refused() -> None:
    with pytest.raises(CacheFullError, match="lower context, batch or layers"):
        FilledCache(replace(SHAPE, context=10**9), LayerFormats.parse("bf16"))
