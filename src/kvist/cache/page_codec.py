"""Writing keys and values into pages and reading them back, for all tokens of a step at once.

The bytes are those that csrc/page_layout.h draws. A page is looked at, by strides alone, as an array with a dimension
for each step of the way to a lane of 4 bytes; tokens are then scattered to it or pages gathered from it:

    keys     [page, KV head, tile of slots, line, slot in the tile]           a lane: some dims of one slot
    values   [page, KV head, tile of dims, line, dim in the tile]             a lane: one dim of some slots
    scalars  [page, KV head, group, slot, scalar]                             together a lane of their own
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from kvist.cache.page_layout import (
    INT8_KEY_BIAS,
    LANE_BYTES,
    LANES,
    PAGE_SLOTS,
    LayerLayout,
    PageLayout,
    storage_format,
)
from kvist.kernels.codec import VectorCodec
from kvist.kernels.key_statics import KeyStatics, PageTurns


class PageCodec:
    """Between the vectors of one layer group and the bytes of its pages.

    What is written for a token depends on that token and its page's number alone, and changes no other token's bytes.

    Args:
        layout: of the pages.
        statics: of each layer of the group, what its quantised keys are coded with; None: nothing.

    Attributes:
        layout: as given.
        statics: of each layer.
        turns: of the layers' offsets, one for each set of frequencies.
    """

    def __init__(self, layout: PageLayout, statics: Sequence[KeyStatics | None] | None = None) -> None:
        self.layout = layout
        self.statics = tuple(statics or [None] * len(layout.layers))
        # Layers of the same frequencies share a table.
        turns: dict[tuple[float, ...], PageTurns] = {}
        self._sides: list[tuple[_Keys, _Values]] = []
        for place, of_layer in zip(layout.layers, self.statics, strict=True):
            turn = None
            if of_layer is not None:
                turn = turns.setdefault(tuple(of_layer.frequencies.tolist()), PageTurns(of_layer.frequencies))
            self._sides.append((_Keys(place, of_layer, turn), _Values(place)))
        self.turns = tuple(turns.values())
        self._turns_at = {frequencies: index for index, frequencies in enumerate(turns)}

    def turns_of(self, statics: KeyStatics) -> int:
        """Which of `turns` turns the offset of a layer with these statics."""
        return self._turns_at[tuple(statics.frequencies.tolist())]

    def write(
        self,
        pages: torch.Tensor,
        layer: int,
        page_ids: torch.Tensor,
        slots: torch.Tensor,
        numbers: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> None:
        """Store one layer's keys and values of `T` tokens.

        Args:
            pages: `[P, page_bytes]` uint8, rows 64-byte aligned and perhaps further apart.
            layer: counted within the group.
            page_ids, slots: `[T]` int64, where each token lies; no place twice.
            numbers: `[T]` int64, of each token's page in its sequence: position div 64.
            k, v: `[T, K, D]`.
        """
        keys, values = self._sides[layer]
        keys.write(pages, page_ids, slots, numbers, k)
        values.write(pages, page_ids, slots, numbers, v)

    def read(
        self, pages: torch.Tensor, layer: int, page_ids: torch.Tensor, numbers: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer's keys and values in `n` pages, as a run of slots: `[K, n * 64, D]` float32 each.

        A slot that was never written holds anything, NaN too: whoever knows the length must put zeros there.

        Args:
            pages, layer: as in `write`.
            page_ids: `[n]` int64.
            numbers: `[n]` int64, the pages' numbers in their sequences, as they were written.
        """
        keys, values = self._sides[layer]
        return keys.read(pages, page_ids, numbers), values.read(pages, page_ids, numbers)


class _Side:
    """The keys or the values of one layer."""

    def __init__(
        self,
        place: LayerLayout,
        name: str,
        codes: int,
        scales: int,
        statics: KeyStatics | None = None,
        turns: PageTurns | None = None,
    ) -> None:
        self._place = place
        self._codes = codes
        self._scales = scales
        self.storage = storage_format(name)
        self.codec = VectorCodec(self.storage, place.head_dim, statics, turns)
        self._scalar_shape = (self.storage.num_groups(place.head_dim), PAGE_SLOTS, self.storage.scalars)

    def _region(self, pages: torch.Tensor, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """The region that starts at byte `start` of each KV head, as `[P, K, *shape]`: a view."""
        typed = pages.view(dtype)
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        head_stride = self._place.head.num_bytes // dtype.itemsize
        offset = typed.storage_offset() + (self._place.offset + start) // dtype.itemsize
        size = (len(pages), self._place.num_kv_heads, *shape)
        return typed.as_strided(size, (typed.stride(0), head_stride, *strides), offset)

    def _write_scalars(
        self, pages: torch.Tensor, page_ids: torch.Tensor, slots: torch.Tensor, scalars: torch.Tensor | None
    ) -> None:
        if scalars is not None:
            self._scalars(pages)[page_ids, :, :, slots] = scalars.permute(3, 2, 0, 1)

    def _decoded(
        self, pages: torch.Tensor, page_ids: torch.Tensor, numbers: torch.Tensor, codes: torch.Tensor
    ) -> torch.Tensor:
        """Vectors `[K, N, D]` of whole pages from their codes `[D, K, N]`."""
        scalars = self._scalars(pages).index_select(0, page_ids).permute(2, 4, 1, 0, 3).flatten(3)
        return self.codec.decode(codes, scalars, numbers).permute(1, 2, 0).contiguous()

    def _scalars(self, pages: torch.Tensor) -> torch.Tensor:
        return self._region(pages, self._scales, self.storage.scalar_dtype, self._scalar_shape)


class _Keys(_Side):
    """A lane holds codes of one token alone, and is written whole."""

    def __init__(self, place: LayerLayout, statics: KeyStatics | None, turns: PageTurns | None) -> None:
        super().__init__(place, place.kv_format.keys, place.head.key_codes, place.head.key_scales, statics, turns)

    def write(
        self, pages: torch.Tensor, page_ids: torch.Tensor, slots: torch.Tensor, numbers: torch.Tensor, x: torch.Tensor
    ) -> None:
        codes, scalars = self.codec.encode(x.permute(2, 1, 0), numbers)
        units = _in_order(codes.permute(2, 1, 0))
        if self.storage.bits == 8:
            units += INT8_KEY_BIAS
        elif self.storage.bits == 4:
            halves = torch.unflatten(units, -1, (-1, 2, LANE_BYTES))
            units = (halves[..., 0, :] | halves[..., 1, :] << 4).flatten(-2)
        self._words(pages)[page_ids, :, slots // LANES, :, slots % LANES] = units.view(torch.int32)
        self._write_scalars(pages, page_ids, slots, scalars)

    def read(self, pages: torch.Tensor, page_ids: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        words = self._words(pages).index_select(0, page_ids)
        units = _in_order(words.permute(1, 0, 2, 4, 3)).flatten(1, 3).view(self.storage.code_dtype)
        if not self.storage.is_quantised:
            return units.float()
        if self.storage.bits == 8:
            units -= INT8_KEY_BIAS
        elif self.storage.bits == 4:
            bytes_ = torch.unflatten(units, -1, (-1, 1, LANE_BYTES))
            units = torch.cat((bytes_ & 0xF, bytes_ >> 4), dim=-2).flatten(-3)
        return self._decoded(pages, page_ids, numbers, units.permute(2, 0, 1))

    def _words(self, pages: torch.Tensor) -> torch.Tensor:
        lines = self._place.head_dim // self.storage.codes_per_lane
        return self._region(pages, self._codes, torch.int32, (PAGE_SLOTS // LANES, lines, LANES))


class _Values(_Side):
    """A lane holds codes of several tokens: each is put beside the others."""

    def __init__(self, place: LayerLayout) -> None:
        super().__init__(place, place.kv_format.values, place.head.value_codes, place.head.value_scales)

    def write(
        self, pages: torch.Tensor, page_ids: torch.Tensor, slots: torch.Tensor, numbers: torch.Tensor, x: torch.Tensor
    ) -> None:
        codes, scalars = self.codec.encode(x.permute(2, 1, 0), numbers)
        # The spare lanes of the last tile get zeros.
        whole = pad(_in_order(codes.permute(2, 1, 0)), (0, -self._place.head_dim % LANES))
        tiles = torch.unflatten(whole, -1, (-1, LANES))
        units = self._units(pages)
        lines = slots // self.storage.codes_per_lane
        if self.storage.bits == 4:
            # Two tokens of one call may share bytes: those in low halves are through before the high ones are read.
            in_high_half = slots % 8 >= 4
            for shift, rows in ((0, ~in_high_half), (4, in_high_half)):
                shared = (page_ids[rows], slice(None), slice(None), lines[rows], slice(None), slots[rows] % 4)
                units[shared] = units[shared] & (0xF0 >> shift) | tiles[rows] << shift
        else:
            units[page_ids, :, :, lines, :, slots % self.storage.codes_per_lane] = tiles
        self._write_scalars(pages, page_ids, slots, scalars)

    def read(self, pages: torch.Tensor, page_ids: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        units = self._units(pages).index_select(0, page_ids)
        if not self.storage.is_quantised:
            return units.permute(1, 0, 3, 5, 2, 4).flatten(4).flatten(1, 3)[..., : self._place.head_dim].float()
        if self.storage.bits == 4:
            units = torch.cat((units & 0xF, units >> 4), dim=-1)
        codes = units.permute(2, 4, 1, 0, 3, 5).flatten(3).flatten(0, 1)
        return self._decoded(pages, page_ids, numbers, codes[: self._place.head_dim])

    def _units(self, pages: torch.Tensor) -> torch.Tensor:
        """Codes, or the bytes that two int4 codes share: `[P, K, tiles, lines, dim in the tile, unit]`."""
        unit = self.storage.code_dtype
        tiles, lines = -(-self._place.head_dim // LANES), PAGE_SLOTS // self.storage.codes_per_lane
        return self._region(pages, self._codes, unit, (tiles, lines, LANES, LANE_BYTES // unit.itemsize))


def _in_order(x: torch.Tensor) -> torch.Tensor:
    """A copy with the strides of its shape: `contiguous` keeps others where a size is 1, and `view(dtype)` minds."""
    return x.clone(memory_format=torch.contiguous_format)
