"""Keys and values through the bytes of pages."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from kvist.cache.page_codec import PageCodec
from kvist.cache.page_layout import INT8_KEY_BIAS, PAGE_SLOTS, PageLayout, storage_format
from kvist.config import STORAGE_FORMATS, KVFormat, LayerConfig
from kvist.kernels import native
from kvist.kernels.codec import VectorCodec

PAIRS = [KVFormat(keys, values) for keys, values in itertools.product(STORAGE_FORMATS, repeat=2)]
SAME = [KVFormat(name, name) for name in STORAGE_FORMATS]
HEAD_DIMS = (8, 24, 64, 80, 96, 128, 256)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def filled_pages(layout: PageLayout, num_pages: int = 3, seed: int = 1) -> torch.Tensor:
    """Pages full of what earlier owners left, NaN and infinity among it, with rows further apart than their bytes."""
    generator = torch.Generator().manual_seed(seed)
    stride = layout.page_bytes + 64
    return torch.randint(0, 256, (num_pages, stride), dtype=torch.uint8, generator=generator)[:, : layout.page_bytes]


def layout_of(kv_format: KVFormat, head_dim: int = 64, num_kv_heads: int = 2) -> PageLayout:
    """Two layers of different shapes; the tests look at the second."""
    layers = [LayerConfig(1, 2 * head_dim, None), LayerConfig(num_kv_heads, head_dim, None)]
    return PageLayout(layers, [KVFormat("fp32", "bf16"), kv_format])


def through_codec(x: torch.Tensor, name: str) -> torch.Tensor:
    """What the format makes of vectors `[T, K, D]`, without pages: `[K, T, D]`."""
    codec = VectorCodec(storage_format(name), x.shape[-1])
    return codec.decode(*codec.encode(x.permute(2, 1, 0))).permute(1, 2, 0)


def places(layout: PageLayout, layer: int, slot: int) -> Iterator[tuple[int, int]]:
    """Byte and mask of everything in a page that belongs to one slot of one layer."""
    place = layout.layers[layer]
    for kv_head, side in itertools.product(range(place.num_kv_heads), ("keys", "values")):
        storage = storage_format(getattr(place.kv_format, side))
        codes, scales = (
            (place.head.key_codes, place.head.key_scales)
            if side == "keys"
            else (place.head.value_codes, place.head.value_scales)
        )
        start = place.head_offset(kv_head)
        for dim in range(place.head_dim):
            byte, bit = native.code_place(side, storage.name, place.head_dim, slot, dim)
            if storage.bits < 8:
                yield start + codes + byte, ((1 << storage.bits) - 1) << bit
            for part in range(storage.bits // 8):
                yield start + codes + byte + part, 0xFF
        for group, scalar in itertools.product(range(storage.num_groups(place.head_dim)), range(storage.scalars)):
            byte = native.scalar_place(storage.name, slot, group, scalar)
            for part in range(storage.scalar_bytes):
                yield start + scales + byte + part, 0xFF


@pytest.mark.parametrize("kv_format", PAIRS, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_what_is_written_is_read_as_the_codec_has_it(kv_format: KVFormat, head_dim: int) -> None:
    layout = layout_of(kv_format, head_dim)
    pages, pager = filled_pages(layout), PageCodec(layout)
    k, v = random(100, 2, head_dim), random(100, 2, head_dim, seed=2)
    positions = torch.arange(100)
    pager.write(pages, 1, torch.tensor([2, 0])[positions // PAGE_SLOTS], positions % PAGE_SLOTS, k, v)
    keys, values = pager.read(pages, 1, torch.tensor([2, 0]))
    assert keys.shape == values.shape == (2, 2 * PAGE_SLOTS, head_dim)
    assert keys.dtype == values.dtype == torch.float32
    assert torch.equal(keys[:, :100], through_codec(k, kv_format.keys))
    assert torch.equal(values[:, :100], through_codec(v, kv_format.values))


@pytest.mark.parametrize("kv_format", SAME, ids=str)
@pytest.mark.parametrize("head_dim", [8, 64])
@pytest.mark.parametrize("num_tokens", [0, 1, 2])
def test_a_single_head_and_few_tokens(kv_format: KVFormat, head_dim: int, num_tokens: int) -> None:
    layout = layout_of(kv_format, head_dim, num_kv_heads=1)
    pages, pager = filled_pages(layout), PageCodec(layout)
    before = pages.clone()
    k, v = random(num_tokens, 1, head_dim), random(num_tokens, 1, head_dim, seed=2)
    slots = torch.arange(num_tokens) + 6
    pager.write(pages, 1, torch.ones_like(slots), slots, k, v)
    keys, values = pager.read(pages, 1, torch.tensor([1]))
    assert torch.equal(keys[:, slots], through_codec(k, kv_format.keys))
    assert torch.equal(values[:, slots], through_codec(v, kv_format.values))
    assert num_tokens or torch.equal(pages, before)


@pytest.mark.parametrize("kv_format", PAIRS, ids=str)
def test_the_bytes_are_where_the_layout_says(kv_format: KVFormat) -> None:
    """Against the library's plain rules, one code after another."""
    layout = layout_of(kv_format, head_dim=24)
    pages, pager = torch.zeros(1, layout.page_bytes, dtype=torch.uint8), PageCodec(layout)
    slots = torch.tensor([5, 17, 63])
    sides = {"keys": random(3, 2, 24), "values": random(3, 2, 24, seed=2)}
    pager.write(pages, 1, torch.zeros(3, dtype=torch.int64), slots, sides["keys"], sides["values"])
    place = layout.layers[1]
    expected = bytearray(layout.page_bytes)
    for side, start, scales in (
        ("keys", place.head.key_codes, place.head.key_scales),
        ("values", place.head.value_codes, place.head.value_scales),
    ):
        storage = storage_format(getattr(place.kv_format, side))
        codes, scalars = VectorCodec(storage, 24).encode(sides[side].permute(2, 1, 0))
        codes = codes.permute(2, 1, 0)
        raw = codes.contiguous().view(torch.uint8).view(3, 2, 24, -1)
        for row, kv_head, dim in itertools.product(range(3), range(2), range(24)):
            byte, bit = native.code_place(side, storage.name, 24, int(slots[row]), dim)
            for part, number in enumerate(raw[row, kv_head, dim].tolist()):
                held = (number + INT8_KEY_BIAS) % 256 if (side, storage.name) == ("keys", "int8") else number
                expected[place.head_offset(kv_head) + start + byte + part] |= held << bit
        if scalars is None:
            continue
        scalars = scalars.permute(3, 2, 0, 1)
        raw = scalars.contiguous().view(torch.uint8).view(*scalars.shape, -1)
        for row, kv_head, group, scalar in itertools.product(*(range(size) for size in scalars.shape)):
            byte = native.scalar_place(storage.name, int(slots[row]), group, scalar)
            for part, number in enumerate(raw[row, kv_head, group, scalar].tolist()):
                expected[place.head_offset(kv_head) + scales + byte + part] = number
    assert pages[0].tolist() == list(expected)


@pytest.mark.parametrize("kv_format", PAIRS, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80])
def test_writing_a_token_changes_no_other_bits(kv_format: KVFormat, head_dim: int) -> None:
    layout = layout_of(kv_format, head_dim)
    pages, pager = filled_pages(layout), PageCodec(layout)
    for slot in (0, 3, 4, 7, 15, 16, 37, 63):
        before = pages.clone()
        pager.write(
            pages,
            1,
            torch.tensor([1]),
            torch.tensor([slot]),
            random(1, 2, head_dim, seed=slot) * 9,
            random(1, 2, head_dim),
        )
        changed = pages ^ before
        mask = torch.zeros(layout.page_bytes, dtype=torch.uint8)
        for byte, bits in places(layout, 1, slot):
            mask[byte] |= bits
        assert int((changed[1] & ~mask).count_nonzero()) == 0
        assert int(changed[[0, 2]].count_nonzero()) == 0
        assert int((changed[1] & mask).count_nonzero()) > 0


@pytest.mark.parametrize("kv_format", PAIRS, ids=str)
def test_the_order_and_company_of_writes_leave_no_trace(kv_format: KVFormat) -> None:
    """A full page's bytes are those of its tokens alone, whatever order, chunks and former contents there were."""
    layout = layout_of(kv_format, head_dim=24)
    pager = PageCodec(layout)
    k, v = random(2 * PAGE_SLOTS, 2, 24), random(2 * PAGE_SLOTS, 2, 24, seed=2)
    other_k, other_v = random(2 * PAGE_SLOTS, 1, 48), random(2 * PAGE_SLOTS, 1, 48, seed=3)
    positions = torch.arange(2 * PAGE_SLOTS)
    outcomes = []
    for seed, chunk in ((0, 2 * PAGE_SLOTS), (1, 1), (2, 7), (3, PAGE_SLOTS)):
        pages = filled_pages(layout, 2, seed)
        order = (
            positions if seed == 0 else torch.randperm(len(positions), generator=torch.Generator().manual_seed(seed))
        )
        for rows in order.split(chunk):
            pager.write(pages, 1, rows // PAGE_SLOTS, rows % PAGE_SLOTS, k[rows], v[rows])
            pager.write(pages, 0, rows // PAGE_SLOTS, rows % PAGE_SLOTS, other_k[rows], other_v[rows])
        outcomes.append(pages)
    for pages in outcomes[1:]:
        assert torch.equal(pages, outcomes[0])


@pytest.mark.parametrize("kv_format", SAME, ids=str)
def test_numbers_that_are_none_stay_with_their_token(kv_format: KVFormat) -> None:
    layout = layout_of(kv_format)
    pages, pager = filled_pages(layout), PageCodec(layout)
    k, v = random(PAGE_SLOTS, 2, 64), random(PAGE_SLOTS, 2, 64, seed=2)
    bad_k, bad_v = k.clone(), v.clone()
    bad_k[9, 0, 5], bad_v[9, 0, 5], bad_k[30], bad_v[31, 1, 0] = torch.nan, torch.inf, -torch.inf, torch.nan
    zeros, slots = torch.zeros(PAGE_SLOTS, dtype=torch.int64), torch.arange(PAGE_SLOTS)
    pager.write(pages, 1, zeros, slots, bad_k, bad_v)
    keys, values = pager.read(pages, 1, zeros[:1])
    assert not keys[0, 9].isfinite().all()
    assert not values[0, 9].isfinite().all()
    good = [slot for slot in range(PAGE_SLOTS) if slot not in (9, 30, 31)]
    assert torch.equal(keys[:, good], through_codec(k, kv_format.keys)[:, good])
    assert torch.equal(values[:, good], through_codec(v, kv_format.values)[:, good])
    # And are gone when their slots are used again.
    pager.write(pages, 1, zeros, slots, k, v)
    keys, values = pager.read(pages, 1, zeros[:1])
    assert keys.isfinite().all()
    assert values.isfinite().all()


@pytest.mark.parametrize("kv_format", SAME, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_keys_and_values_come_in_any_dtype_and_stride(kv_format: KVFormat, dtype: torch.dtype) -> None:
    layout = layout_of(kv_format)
    pager = PageCodec(layout)
    both = random(5, 2, 2 * 64).to(dtype)
    k, v = both[..., :64], both[..., 64:]
    ids, slots = torch.zeros(5, dtype=torch.int64), torch.arange(5)
    pages = torch.zeros(1, layout.page_bytes, dtype=torch.uint8)
    pager.write(pages, 1, ids, slots, k, v)
    again = torch.zeros_like(pages)
    pager.write(again, 1, ids, slots, k.float().contiguous(), v.float().contiguous())
    assert torch.equal(pages, again)
