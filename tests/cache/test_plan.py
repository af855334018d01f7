"""The planner's formula against what the cache commits while sequences are written through it in steps."""

from __future__ import annotations

import sys

import pytest
import torch

from cache_checks import bytes_in_use, check_books, committed_bytes
from key_texts import identity_statics
from kvist.cache.kv_cache import KVCache, Span
from kvist.cache.page_layout import PAGE_SLOTS
from kvist.cache.plan import CachePlan
from kvist.config import CacheConfig, LayerConfig
from kvist.errors import OptionError
from kvist.kv_format import LayerFormats
from kvist.memory import binary_size
from kvist.models.registry import decoder_config

SLACK, MAX_STEP = 64, 128
FORMATS = ("fp32", "bf16", "int8", "k=int8,v=int4", "int4", "int4/0:fp32/2:k=int8,v=bf16")

_SHAPE = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
# A configuration of every family, with heads and windows of every kind.
FAMILIES: dict[str, dict[str, object]] = {
    "llama": {"model_type": "llama"},
    "llama_mha": {"model_type": "llama", "num_key_value_heads": 6, "head_dim": 80},
    "llama_mqa": {"model_type": "llama", "num_key_value_heads": 1, "head_dim": 96},
    "mistral": {"model_type": "mistral", "sliding_window": 7},
    "mistral_full": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {
        "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 100, "max_window_layers": 1
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 64},
    "gemma3": {"model_type": "gemma3_text", "head_dim": 32, "sliding_window": 65, "num_hidden_layers": 6},
}  # fmt: skip


def layers_of(family: str) -> tuple[LayerConfig, ...]:
    return decoder_config({**_SHAPE, **FAMILIES[family]}).layers


def plan_of(layers: tuple[LayerConfig, ...], kv_format: str) -> CachePlan:
    return CachePlan(layers, LayerFormats.parse(kv_format), SLACK, MAX_STEP)


def cache_of(layers: tuple[LayerConfig, ...], kv_format: str, memory_bytes: int) -> KVCache:
    config = CacheConfig(LayerFormats.parse(kv_format), memory_bytes, SLACK, MAX_STEP)
    return KVCache(layers, config, key_statics=identity_statics(layers))


def write_through(cache: KVCache, batch: int, context: int, step: int) -> int:
    """Write sequences to their end, all in the same steps; the most bytes that were committed at once."""
    sequences = [cache.open() for _ in range(batch)]
    assert all(cache.reserve(sequence, context) for sequence in sequences)
    high_water = 0
    for start in range(0, context, step):
        num_tokens = min(step, context - start)
        view = cache.view([Span(sequence, num_tokens) for sequence in sequences])
        for layer, shape in enumerate(cache.layers):
            k = torch.ones(batch * num_tokens, shape.num_kv_heads, shape.head_dim)
            view.write(layer, k, k)
        high_water = max(high_water, bytes_in_use(cache))
        cache.commit(view)
    return high_water


def borders(layers: tuple[LayerConfig, ...]) -> list[int]:
    """Contexts around the ends of pages, of windows with their slack, and of the most that a window keeps."""
    around = {1, 63, 64, 65, 129}
    for window in {layer.window for layer in layers} - {None}:
        assert window is not None
        for end in (window, window + SLACK, window + SLACK + MAX_STEP, window + SLACK + MAX_STEP + 2 * PAGE_SLOTS):
            around |= {end - 1, end, end + 1}
    return sorted(around)


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_planned_suffices_and_is_what_is_committed(family: str, kv_format: str) -> None:
    layers = layers_of(family)
    plan = plan_of(layers, kv_format)
    windows = [layer.window for layer in layers if layer.window is not None]
    for number, context in enumerate(borders(layers)):
        for batch, step in ((1, MAX_STEP), (2, 40 + number)):
            cache = cache_of(layers, kv_format, batch * plan.bytes_for(context))
            high_water = write_through(cache, batch, context, step)
            assert high_water <= batch * plan.bytes_for(context)
            for group, planned in zip(cache.groups, plan.groups, strict=True):
                if planned.layer_group.window is None:
                    assert group.pool.bytes_in_use == batch * planned.bytes_for(context)
            if context <= min(windows, default=context) + SLACK:
                assert bytes_in_use(cache) == high_water == batch * plan.bytes_for(context)
            check_books(cache)


def test_the_budget_of_the_plan_is_the_least_that_is_enough() -> None:
    for family in FAMILIES:
        layers = layers_of(family)
        plan = plan_of(layers, "int8")
        for context in borders(layers):
            cache = cache_of(layers, "int8", max(plan.least_bytes, 2 * plan.bytes_for(context) - 1))
            assert cache.reserve(cache.open(), context)
            assert not cache.reserve(cache.open(), context)


@pytest.mark.parametrize("window", [1, 63, 100, 129])
def test_a_window_comes_to_all_the_pages_that_are_planned(window: int) -> None:
    layers = (LayerConfig(1, 64, window),)
    plan = plan_of(layers, "bf16")
    (group,) = plan.groups
    assert group.rules.most_pages(10**6) == group.rules.most_live
    most = 0
    # A step of one token first, so that the runs of the others begin at every slot of a page.
    for first in range(PAGE_SLOTS):
        cache = cache_of(layers, "bf16", plan.bytes_for(1000))
        sequence = cache.open()
        assert cache.reserve(sequence, 1000)
        for num_tokens in (max(1, first), *[MAX_STEP] * 5):
            view = cache.view([Span(sequence, num_tokens)])
            most = max(most, bytes_in_use(cache))
            cache.commit(view)
    assert plan.bytes_for(1000) - group.stride <= most <= plan.bytes_for(1000)


def test_what_is_planned_is_what_the_system_gives() -> None:
    layers = layers_of("gemma3")
    plan = plan_of(layers, "int4")
    cache = cache_of(layers, "int4", 2 * plan.bytes_for(130))
    write_through(cache, 2, 129, MAX_STEP)
    given = [committed_bytes(group.pool) for group in cache.groups]
    if None in given:
        pytest.skip("this system does not say which memory is committed")
    assert given == [2 * group.bytes_for(129) for group in plan.groups]


def test_a_budget_in_which_no_sequence_can_begin_is_refused() -> None:
    for family, groups in (("llama", ""), ("gemma3", " for each of 2 layer groups")):
        plan = plan_of(layers_of(family), "int8")
        plan.check_budget(plan.least_bytes)
        with pytest.raises(OptionError) as caught:
            plan.check_budget(plan.least_bytes - 1)
        least = f"{binary_size(plan.least_bytes)} ({plan.least_bytes:,} bytes), a page of 64 tokens in int8{groups}"
        # Rounded, the two sizes would read alike.
        assert str(caught.value) == f"kv_memory is {plan.least_bytes - 1:,} bytes: it must be at least {least}"
        with pytest.raises(OptionError, match=r"^kv_memory is 1\.0 KiB: it must be at least"):
            plan.check_budget(1024)


# --- what fits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch", [1, 2, 7])
def test_the_tokens_that_fit_are_the_most(family: str, batch: int) -> None:
    plan = plan_of(layers_of(family), "k=int8,v=int4")
    steps = [0, 1, plan.groups[0].stride - 1, plan.groups[0].stride]
    for memory_bytes in (
        plan.bytes_for(num_tokens) * batch + step for num_tokens in (1, 64, 65, 700) for step in steps
    ):
        tokens = plan.max_tokens(memory_bytes, batch)
        assert tokens >= PAGE_SLOTS
        assert batch * plan.bytes_for(tokens) <= memory_bytes
        if tokens != sys.maxsize:
            assert tokens % PAGE_SLOTS == 0
            assert batch * plan.bytes_for(tokens + 1) > memory_bytes
    assert plan.max_tokens(batch * plan.least_bytes - 1, batch) == 0
    assert plan.max_tokens(batch * plan.least_bytes, batch) == PAGE_SLOTS


def test_the_cache_has_the_plan_s_figures() -> None:
    layers = layers_of("gemma3")
    plan = plan_of(layers, "int8")
    for memory_bytes in (plan.least_bytes, plan.bytes_for(1000), plan.bytes_for(1000) + 1):
        cache = cache_of(layers, "int8", memory_bytes)
        assert cache.max_tokens == plan.max_tokens(memory_bytes)
        assert cache.bytes_for(777) == plan.bytes_for(777)
        assert cache.bytes_per_token == plan.bytes_per_token


def test_sequences_fit_as_often_as_they_can_be_reserved() -> None:
    layers = layers_of("gemma3")
    plan = plan_of(layers, "bf16")
    memory_bytes = 5 * plan.bytes_for(300) - 1
    cache = cache_of(layers, "bf16", memory_bytes)
    reserved = 0
    while cache.reserve(cache.open(), 300):
        reserved += 1
    assert plan.max_sequences(memory_bytes, 300) == reserved == 4
    assert plan.max_sequences(memory_bytes + 1, 300) == 5


def test_windows_alone_have_no_end() -> None:
    plan = plan_of(layers_of("mistral"), "bf16")
    most = plan.bytes_for(sys.maxsize)
    assert plan.max_tokens(2 * most, 2) == sys.maxsize
    assert 0 < plan.max_tokens(2 * most - 1, 2) < 1000


def test_a_format_that_the_head_dim_or_the_layers_do_not_allow_is_refused() -> None:
    with pytest.raises(OptionError, match="int4 cannot take a head dim of 20"):
        plan_of((LayerConfig(1, 20, None),), "int4")
    with pytest.raises(OptionError, match="names layer 3"):
        plan_of(layers_of("llama"), "int4/3:int8")
