"""Keys and values through the bytes of pages."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import pytest
import torch

from key_texts import frequencies, statics_of
from kvist.cache.cache_view import Span
from kvist.cache.kv_cache import KVCache
from kvist.cache.page_codec import PageCodec
from kvist.cache.page_layout import INT8_KEY_BIAS, PAGE_SLOTS, PageLayout, storage_format
from kvist.config import CacheConfig, LayerConfig
from kvist.kernels import native
from kvist.kernels.codec import VectorCodec
from kvist.kernels.key_statics import KeyStatics
from kvist.kv_format import KV_FORMATS, KVFormat, LayerFormats

PAIRS = [KVFormat(keys, values) for keys, values in itertools.product(KV_FORMATS, repeat=2)]
SAME = [KVFormat(name, name) for name in KV_FORMATS]
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


def through_codec(
    x: torch.Tensor, name: str, statics: KeyStatics | None = None, numbers: torch.Tensor | None = None
) -> torch.Tensor:
    """What the format makes of vectors `[T, K, D]` of some pages, without pages: `[K, T, D]`."""
    codec = VectorCodec(storage_format(name), x.shape[-1], statics)
    numbers = torch.zeros(len(x), dtype=torch.int64) if numbers is None else numbers
    return codec.decode(*codec.encode(x.permute(2, 1, 0), numbers), numbers).permute(1, 2, 0)


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
        start = place.offset + kv_head * place.head.num_bytes
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
    rows, ids, numbers = positions // PAGE_SLOTS, torch.tensor([2, 0]), torch.tensor([0, 1])
    pager.write(pages, 1, ids[rows], positions % PAGE_SLOTS, rows, k, v)
    keys, values = pager.read(pages, 1, ids, numbers)
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
    pager.write(pages, 1, torch.ones_like(slots), slots, torch.zeros_like(slots), k, v)
    keys, values = pager.read(pages, 1, torch.tensor([1]), torch.tensor([0]))
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
    zeros = torch.zeros(3, dtype=torch.int64)
    pager.write(pages, 1, zeros, slots, zeros, sides["keys"], sides["values"])
    place = layout.layers[1]
    expected = bytearray(layout.page_bytes)
    for side, start, scales in (
        ("keys", place.head.key_codes, place.head.key_scales),
        ("values", place.head.value_codes, place.head.value_scales),
    ):
        storage = storage_format(getattr(place.kv_format, side))
        codes, scalars = VectorCodec(storage, 24).encode(sides[side].permute(2, 1, 0), zeros)
        codes = codes.permute(2, 1, 0)
        raw = codes.contiguous().view(torch.uint8).view(3, 2, 24, -1)
        for row, kv_head, dim in itertools.product(range(3), range(2), range(24)):
            byte, bit = native.code_place(side, storage.name, 24, int(slots[row]), dim)
            for part, number in enumerate(raw[row, kv_head, dim].tolist()):
                held = (number + INT8_KEY_BIAS) % 256 if (side, storage.name) == ("keys", "int8") else number
                expected[place.offset + kv_head * place.head.num_bytes + start + byte + part] |= held << bit
        if scalars is None:
            continue
        scalars = scalars.permute(3, 2, 0, 1)
        raw = scalars.contiguous().view(torch.uint8).view(*scalars.shape, -1)
        for row, kv_head, group, scalar in itertools.product(*(range(size) for size in scalars.shape)):
            byte = native.scalar_place(storage.name, int(slots[row]), group, scalar)
            for part, number in enumerate(raw[row, kv_head, group, scalar].tolist()):
                expected[place.offset + kv_head * place.head.num_bytes + scales + byte + part] = number
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
            torch.tensor([0]),
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
    pager = PageCodec(layout, [None, statics_of(24)])
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
            ids, slots = rows // PAGE_SLOTS, rows % PAGE_SLOTS
            pager.write(pages, 1, ids, slots, ids + 9, k[rows], v[rows])
            pager.write(pages, 0, ids, slots, ids + 9, other_k[rows], other_v[rows])
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
    pager.write(pages, 1, zeros, slots, zeros, bad_k, bad_v)
    keys, values = pager.read(pages, 1, zeros[:1], zeros[:1])
    assert not keys[0, 9].isfinite().all()
    assert not values[0, 9].isfinite().all()
    good = [slot for slot in range(PAGE_SLOTS) if slot not in (9, 30, 31)]
    assert torch.equal(keys[:, good], through_codec(k, kv_format.keys)[:, good])
    assert torch.equal(values[:, good], through_codec(v, kv_format.values)[:, good])
    # And are gone when their slots are used again.
    pager.write(pages, 1, zeros, slots, zeros, k, v)
    keys, values = pager.read(pages, 1, zeros[:1], zeros[:1])
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
    pager.write(pages, 1, ids, slots, ids, k, v)
    again = torch.zeros_like(pages)
    pager.write(again, 1, ids, slots, ids, k.float().contiguous(), v.float().contiguous())
    assert torch.equal(pages, again)


# --- keys less the offsets of their pages -----------------------------------------------------------------------------


@pytest.mark.parametrize("kv_format", PAIRS, ids=str)
@pytest.mark.parametrize("head_dim", [8, 80])
def test_keys_come_back_with_the_offsets_of_their_pages(kv_format: KVFormat, head_dim: int) -> None:
    layout, statics = layout_of(kv_format, head_dim), statics_of(head_dim)
    pages, pager = filled_pages(layout), PageCodec(layout, [None, statics])
    k, v = random(100, 2, head_dim), random(100, 2, head_dim, seed=2)
    rows, ids, numbers = torch.arange(100) // PAGE_SLOTS, torch.tensor([2, 0]), torch.tensor([1, 100])
    pager.write(pages, 1, ids[rows], torch.arange(100) % PAGE_SLOTS, numbers[rows], k, v)
    keys, values = pager.read(pages, 1, ids, numbers)
    assert torch.equal(keys[:, :100], through_codec(k, kv_format.keys, statics, numbers[rows]))
    assert torch.equal(values[:, :100], through_codec(v, kv_format.values))
    assert torch.equal(keys[:, 64:100], through_codec(k[64:], kv_format.keys, statics, numbers[rows[64:]]))
    none = pager.read(pages, 1, ids[:0], numbers[:0])
    assert none[0].shape == none[1].shape == (2, 0, head_dim)


@pytest.mark.parametrize("kv_format", SAME, ids=str)
def test_bytes_depend_on_the_page_s_number_where_keys_are_quantised(kv_format: KVFormat) -> None:
    layout = layout_of(kv_format)
    pager = PageCodec(layout, [None, statics_of(64)])
    k, v = random(PAGE_SLOTS, 2, 64), random(PAGE_SLOTS, 2, 64, seed=2)
    slots, outcomes = torch.arange(PAGE_SLOTS), []
    for number in (0, 0, 1, 100):
        pages = torch.zeros(1, layout.page_bytes, dtype=torch.uint8)
        pager.write(pages, 1, torch.zeros_like(slots), slots, torch.full_like(slots, number), k, v)
        outcomes.append(pages[0])
    assert torch.equal(outcomes[0], outcomes[1])
    place = layout.layers[1]
    for pages in outcomes[2:]:
        for kv_head in range(2):
            start = place.offset + kv_head * place.head.num_bytes
            keys, values = (
                slice(start + place.head.key_codes, start + place.head.value_codes),
                slice(start + place.head.value_codes, start + place.head.num_bytes),
            )
            assert torch.equal(pages[values], outcomes[0][values])
            assert torch.equal(pages[keys], outcomes[0][keys]) != storage_format(kv_format.keys).is_quantised


def test_each_layer_turns_by_its_own_frequencies() -> None:
    int8 = KVFormat("int8", "int8")
    layout = PageLayout([LayerConfig(2, 64, None)] * 4, [int8] * 4)
    one, other = statics_of(64), dataclasses.replace(statics_of(64), frequencies=frequencies(64, theta=1e6))
    pager = PageCodec(layout, [one, other, None, one])
    pages, k = filled_pages(layout, 1), random(5, 2, 64)
    zeros, slots, numbers = torch.zeros(5, dtype=torch.int64), torch.arange(5), torch.full((5,), 100)
    for layer, statics in enumerate((one, other, None, one)):
        pager.write(pages, layer, zeros, slots, numbers, k, k)
        keys, _ = pager.read(pages, layer, zeros[:1], numbers[:1])
        assert torch.equal(keys[:, :5], through_codec(k, "int8", statics, numbers))


def test_a_cache_tells_its_pages_numbers() -> None:
    """Over several steps, sequences and a window that has dropped its first pages."""
    statics, layers = [statics_of(64), statics_of(64)], [LayerConfig(2, 64, None), LayerConfig(2, 64, 70)]
    config = CacheConfig(LayerFormats(KVFormat("int4", "int8")), 1 << 22, rewind_slack_tokens=0)
    cache = KVCache(layers, config, key_statics=statics)
    texts = {cache.open(): random(500, 2, 64, seed=seed) for seed in (1, 2)}
    assert all(cache.reserve(sequence_id, 500) for sequence_id in texts)
    for steps in ([300, 7], [0, 150], [130, 1]):
        starts = [cache.length(sequence_id) for sequence_id in texts]
        spans = [Span(sequence_id, size) for sequence_id, size in zip(texts, steps, strict=True) if size]
        view = cache.view(spans)
        parts = [text[at : at + size] for text, at, size in zip(texts.values(), starts, steps, strict=True)]
        for layer in range(2):
            view.write(layer, torch.cat(parts), torch.cat(parts))
        cache.commit(view)
    lengths = [cache.length(sequence_id) for sequence_id in texts]
    assert lengths == [430, 158]
    view = cache.view([Span(sequence_id, 1) for sequence_id in texts])
    for index, (text, length) in enumerate(zip(texts.values(), lengths, strict=True)):
        expected = through_codec(text[:length], "int4", statics[0], torch.arange(length) // PAGE_SLOTS)
        for layer, first in ((0, 0), (1, length - 69)):
            keys, _ = view.read_split(layer, index, 0, 512)
            assert torch.equal(keys[:, first:length], expected[:, first:])
            late, _ = view.read_split(layer, index, 128, 512)
            assert torch.equal(late[:, max(0, first - 128) : length - 128], expected[:, max(first, 128) :])
