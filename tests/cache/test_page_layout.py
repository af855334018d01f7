"""Where the bytes of a page lie, and which layers share one."""

from __future__ import annotations

import itertools

import pytest

from kvist.cache.page_layout import LANES, PAGE_SLOTS, LayerGroup, PageLayout, layer_groups, storage_format
from kvist.config import LayerConfig
from kvist.errors import OptionError
from kvist.kernels import native
from kvist.kv_format import KV_FORMATS, KVFormat

PAIRS = [KVFormat(keys, values) for keys, values in itertools.product(KV_FORMATS, repeat=2)]
HEAD_DIMS = (8, 64, 80, 96, 128, 256)


def test_groups_are_full_attention_first_then_windows_ascending() -> None:
    layers = [LayerConfig(1, 8, window) for window in (512, None, 64, 512, None)]
    assert layer_groups(layers) == (LayerGroup(None, (1, 4)), LayerGroup(64, (2,)), LayerGroup(512, (0, 3)))


def test_a_model_without_full_attention_has_no_group_for_it() -> None:
    assert layer_groups([LayerConfig(1, 8, 4)] * 2) == (LayerGroup(4, (0, 1)),)


def test_every_format_of_the_configuration_has_a_layout_and_no_other() -> None:
    assert set(native.page_layout()["formats"]) == set(KV_FORMATS)


@pytest.mark.parametrize("kv_format", PAIRS, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_regions_are_aligned_apart_and_within_the_page(kv_format: KVFormat, head_dim: int) -> None:
    layers = [LayerConfig(3, head_dim, None), LayerConfig(1, 2 * head_dim, None)]
    layout = PageLayout(layers, [kv_format, kv_format])
    end = 0
    for layer in layout.layers:
        assert layer.offset == end
        for kv_head in range(layer.num_kv_heads):
            start, head = layer.offset + kv_head * layer.head.num_bytes, layer.head
            assert start == end
            assert 0 == head.key_codes < head.key_scales <= head.value_codes < head.value_scales <= head.num_bytes
            assert all(region % 64 == 0 for region in (start, head.key_scales, head.value_codes, head.value_scales))
            end = start + head.num_bytes
    assert layout.page_bytes == end
    assert layout.page_bytes % 64 == 0


@pytest.mark.parametrize(("name", "bytes_per_token"), [("fp32", 46_080), ("bf16", 23_040)])
def test_plain_formats_cost_what_their_numbers_do(name: str, bytes_per_token: int) -> None:
    smollm2 = [LayerConfig(3, 64, None)] * 30
    assert PageLayout(smollm2, [KVFormat(name, name)] * 30).page_bytes == PAGE_SLOTS * bytes_per_token


def test_layers_of_one_group_may_differ() -> None:
    layers = [LayerConfig(2, 64, None), LayerConfig(1, 128, None)]
    mixed = PageLayout(layers, [KVFormat("bf16", "fp32"), KVFormat("fp32", "fp32")])
    assert mixed.page_bytes == PAGE_SLOTS * (2 * 64 * (2 + 4) + 128 * 8)
    assert mixed.layers[1].offset == PAGE_SLOTS * 2 * 64 * (2 + 4)


@pytest.mark.parametrize("name", KV_FORMATS)
@pytest.mark.parametrize("head_dim", [8, 64, 80])
def test_every_code_has_a_place_of_its_own(name: str, head_dim: int) -> None:
    storage = storage_format(name)
    head = PageLayout([LayerConfig(1, head_dim, None)], [KVFormat(name, name)]).layers[0].head
    for side, size in (("keys", head.key_scales), ("values", head.value_scales - head.value_codes)):
        bits = set()
        for slot, dim in itertools.product(range(PAGE_SLOTS), range(head_dim)):
            byte, bit = native.code_place(side, name, head_dim, slot, dim)
            assert 8 * byte + bit + storage.bits <= 8 * size
            bits.update(range(8 * byte + bit, 8 * byte + bit + storage.bits))
        assert len(bits) == PAGE_SLOTS * head_dim * storage.bits


@pytest.mark.parametrize("name", KV_FORMATS)
def test_a_lane_holds_consecutive_dims_of_a_key_and_consecutive_slots_of_a_value(name: str) -> None:
    codes = storage_format(name).codes_per_lane
    for other in range(codes):
        assert native.code_place("keys", name, 64, 17, codes + other)[0] // 4 == 64 // codes * LANES + LANES + 1
        assert native.code_place("values", name, 64, codes + other, 17)[0] // 4 == 64 // codes * LANES + LANES + 1


@pytest.mark.parametrize("name", [name for name in KV_FORMATS if storage_format(name).scalars])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_every_scalar_has_a_place_of_its_own(name: str, head_dim: int) -> None:
    storage = storage_format(name)
    head = PageLayout([LayerConfig(1, head_dim, None)], [KVFormat(name, "fp32")]).layers[0].head
    places = [
        native.scalar_place(name, slot, group, scalar)
        for group in range(storage.num_groups(head_dim))
        for slot in range(PAGE_SLOTS)
        for scalar in range(storage.scalars)
    ]
    assert places == list(range(0, head.value_codes - head.key_scales, storage.scalar_bytes))


@pytest.mark.parametrize(
    ("kv_format", "head_dim", "message"),
    [
        (
            KVFormat("bf16", "bf16"),
            15,
            "kv_format bf16 cannot take a head dim of 15: it takes multiples of 2 up to 1024",
        ),
        (
            KVFormat("fp32", "int8"),
            66,
            "kv_format int8 cannot take a head dim of 66: it takes multiples of 4 up to 1024",
        ),
        (
            KVFormat("int4", "int8"),
            20,
            "kv_format int4 cannot take a head dim of 20: it takes multiples of 8 up to 1024",
        ),
    ],
    ids=str,
)
def test_a_head_dim_that_a_format_cannot_take_is_refused(kv_format: KVFormat, head_dim: int, message: str) -> None:
    with pytest.raises(OptionError) as error:
        PageLayout([LayerConfig(1, head_dim, None)], [kv_format])
    can = {15: "fp32", 66: "fp32, bf16", 20: "fp32, bf16, int8"}[head_dim]
    assert str(error.value) == f"{message}; {can} can take {head_dim}"


def test_a_head_dim_that_no_format_takes_is_refused() -> None:
    with pytest.raises(OptionError, match=r"fp32 cannot take a head dim of 2048: .*; no format can$"):
        PageLayout([LayerConfig(1, 2048, None)], [KVFormat("fp32", "fp32")])


def test_the_library_refuses_what_lies_outside_a_page() -> None:
    for arguments, message in (
        (("keys", "int9", 64, 0, 0), "'int9' is no storage format"),
        (("both", "int8", 64, 0, 0), "side is 'both'"),
        (("keys", "int8", 66, 0, 0), "head_dim is 66: int8 takes multiples of 4"),
        (("keys", "int8", -4, 0, 0), "head_dim is -4"),
        (("keys", "int8", 64, PAGE_SLOTS, 0), "slot is 64"),
        (("values", "int8", 64, 0, 64), "dim is 64"),
    ):
        with pytest.raises(ValueError, match=message):
            native.code_place(*arguments)
    with pytest.raises(ValueError, match="scalar is 0"):
        native.scalar_place("bf16", 0, 0, 0)
