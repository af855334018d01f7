"""What the layers of one step see of the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from kvist.cache.native_pages import NativePages
from kvist.cache.page_codec import PageCodec
from kvist.cache.page_layout import PAGE_SLOTS, LayerGroup, LayerLayout
from kvist.cache.page_pool import PagePool
from kvist.cache.page_table import PageRules, PageTable, pages_of
from kvist.errors import SequenceError
from kvist.kernels.native_types import PageLayer, PageStep


@dataclass(frozen=True)
class Span:
    """A run of consecutive new tokens of one sequence in a step."""

    sequence_id: int
    num_tokens: int


@dataclass(frozen=True)
class CacheGroup:
    """A layer group of the cache.

    Attributes:
        layer_group: its layers and window.
        codec: between tensors and the bytes of its pages.
        native: what native kernels need to know of it; None where its pages are not on the CPU.
        pool: its pages.
        rules: how many pages its sequences need.
    """

    layer_group: LayerGroup
    codec: PageCodec
    native: NativePages | None
    pool: PagePool
    rules: PageRules


@dataclass(eq=False)
class CachedSequence:
    """A sequence in the cache. Only the cache changes it.

    Attributes:
        tables: its pages in each group.
        length: tokens whose keys and values are committed.
        reserved: tokens that it may grow to, `length` at least.
        changes: how often something happened to it after which a view asked for before is of no use any more.
    """

    tables: tuple[PageTable, ...]
    length: int = 0
    reserved: int = 0
    changes: int = 0


class CacheView:
    """What the layers of one step write to and read from.

    Args:
        groups: the cache's groups.
        spans: the step's runs of tokens.
        sequences: the sequence of each span. Their pages for the step are there.
        device: where tensors are made.

    Attributes:
        groups: the cache's groups, as given.
        spans: the step's runs of tokens, in the order in which they are packed into `T`.
        row_starts: for each span, its first row in `T`.
        first_positions: for each span, the position of its first token in its sequence.
        sequences: for each span, its sequence.
        num_tokens: `T`.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        spans: Sequence[Span],
        sequences: Sequence[CachedSequence],
        device: torch.device,
    ) -> None:
        self.spans = tuple(spans)
        self.sequences = tuple(sequences)
        self.first_positions = tuple(sequence.length for sequence in sequences)
        *row_starts, self.num_tokens = accumulate((span.num_tokens for span in spans), initial=0)
        self.row_starts = tuple(row_starts)
        self._changes = tuple(sequence.changes for sequence in sequences)
        self.groups = tuple(groups)
        # For each layer its group, and its place in the group's pages.
        self._places = {
            layer: (index, row)
            for index, group in enumerate(groups)
            for row, layer in enumerate(group.layer_group.layers)
        }
        positions: list[int] = []
        for first, span in zip(self.first_positions, spans, strict=True):
            positions.extend(range(first, first + span.num_tokens))
        self._positions = torch.tensor(positions, dtype=torch.int64, device=device)
        # Made when a layer of the group needs them: the pages of each row, or the native step with the pool's tensor.
        self._write_pages: dict[int, torch.Tensor] = {}
        self._native_steps: dict[int, tuple[torch.Tensor, PageStep]] = {}

    def positions(self) -> torch.Tensor:
        """Each token's position in its own sequence, `[T]` int64."""
        return self._positions

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store this step's keys and values `[T, K, D]` of a layer, in the cache's format.

        Raises:
            SequenceError: since the view was made a sequence of the step was committed, rewound, unreserved or
                released, or another view of it was asked for.
            ValueError: there is no such layer, or `k` and `v` are not of its shape or no floating-point numbers.
        """
        self.check_current()
        layout = self.layout(layer)
        shape = (self.num_tokens, layout.num_kv_heads, layout.head_dim)
        if k.shape != shape or v.shape != shape:
            raise ValueError(f"layer {layer} takes keys and values {shape}, not {tuple(k.shape)} and {tuple(v.shape)}")
        _check_floats(k=k, v=v)
        index, row = self._place(layer)
        group = self.groups[index]
        if group.native is not None:
            group.native.append(self._native_step(index, group.native), row, k, v)
            return
        if index not in self._write_pages:
            pages = self._pages_of_rows(index)
            self._write_pages[index] = torch.tensor(pages, dtype=torch.int64, device=self._positions.device)
        slots, numbers = self._positions % PAGE_SLOTS, self._positions // PAGE_SLOTS
        group.codec.write(group.pool.pages, row, self._write_pages[index], slots, numbers, k, v)

    def layout(self, layer: int) -> LayerLayout:
        """Where a layer lies in its group's pages, and of what shape it is."""
        index, row = self._place(layer)
        return self.groups[index].codec.layout.layers[row]

    def window(self, layer: int) -> int | None:
        """Tokens that a query of a layer sees, itself included; None sees all."""
        return self.groups[self._place(layer)[0]].layer_group.window

    def is_native(self, layer: int) -> bool:
        """Whether native kernels can work on the layer's pages."""
        return self.groups[self._place(layer)[0]].native is not None

    def native_layers(self) -> list[tuple[PageStep, PageLayer] | None]:
        """This step's pages and each layer's place in them, for native kernels that write and read by themselves.

        None where the pages are not on the CPU. The caller has seen to it that the view is current (`check_current`).
        """
        layers: list[tuple[PageStep, PageLayer] | None] = [None] * len(self._places)
        for index, group in enumerate(self.groups):
            if group.native is None:
                continue
            step = self._native_step(index, group.native)
            for layer, place in zip(group.layer_group.layers, group.native.layers, strict=True):
                layers[layer] = step, place
        return layers

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Native attention of this step's queries `[T, H, D]` over the pages of a layer for which `is_native` holds.

        Args:
            layer: whose. This step's keys and values are written already.
            q: the queries, packed as the spans are.
            scale, softcap, sinks: as in `kernels.split_attention.attention`.

        Returns:
            `[T, H, D]` in the dtype of `q`.

        Raises:
            SequenceError: as `write`.
            ValueError: there is no such layer, or `q` is not of its head_dim or no floating-point numbers.
        """
        self.check_current()
        _check_floats(q=q)
        index, row = self._place(layer)
        native = self.groups[index].native
        if native is None:
            raise ValueError(f"the pages of layer {layer} are not on the CPU: read them instead")
        return native.attend(self._native_step(index, native), row, q, scale=scale, softcap=softcap, sinks=sinks)

    def read_split(self, layer: int, index: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a run of positions of span `index`'s sequence, this step's included.

        Args:
            layer: whose.
            index: of the span.
            start: the first position, the first of a page.
            stop: the one after the last. It may lie beyond the sequence's end.

        Returns:
            `[K, stop - start, D]` float32 each. All zeros beyond the sequence's end, and where pages were dropped
            since no query sees them.

        Raises:
            SequenceError: as `write`.
        """
        if start % PAGE_SLOTS:
            raise ValueError(f"start is {start}: it must be a multiple of {PAGE_SLOTS}")
        self._check_current(index)
        group, row = self._place(layer)
        codec, pool, table = self.groups[group].codec, self.groups[group].pool, self.sequences[index].tables[group]
        end = min(stop, self.first_positions[index] + self.spans[index].num_tokens)
        first, last = max(start // PAGE_SLOTS, table.first), min(pages_of(end), table.stop)
        pages = table.tensor()[max(0, first - table.first) : max(0, last - table.first)]
        numbers = torch.arange(first, first + len(pages), device=pages.device)
        k, v = codec.read(pool.pages, row, pages, numbers)
        at = first * PAGE_SLOTS - start
        return _placed(k, at, end - start, stop - start), _placed(v, at, end - start, stop - start)

    def check_current(self) -> None:
        """Raise `SequenceError` where the view is of no use any more, as `write` does."""
        for index in range(len(self.spans)):
            self._check_current(index)

    def _place(self, layer: int) -> tuple[int, int]:
        """A layer's group, and its place in the group's pages."""
        try:
            return self._places[layer]
        except KeyError:
            raise ValueError(f"layer {layer} is not in this cache: it has {len(self._places)}, from 0 on") from None

    def _check_current(self, index: int) -> None:
        if self.sequences[index].changes != self._changes[index]:
            raise SequenceError(
                f"sequence {self.spans[index].sequence_id} was committed, rewound, unreserved or released, or another "
                "view of it was asked for, since this view was made: ask for another"
            )

    def _native_step(self, group: int, native: NativePages) -> PageStep:
        """The group's pages for native kernels, made anew where the pool has moved."""
        pages, made = self.groups[group].pool.pages, self._native_steps.get(group)
        if made is None or made[0] is not pages:
            num_tokens = [span.num_tokens for span in self.spans]
            tables = [sequence.tables[group] for sequence in self.sequences]
            made = self._native_steps[group] = (pages, native.step(pages, num_tokens, self.first_positions, tables))
        return made[1]

    def _pages_of_rows(self, group: int) -> list[int]:
        """For each row of `T` the page that its token is written to."""
        pages: list[int] = []
        for first, span, sequence in zip(self.first_positions, self.spans, self.sequences, strict=True):
            table, stop = sequence.tables[group], first + span.num_tokens
            for number in range(first // PAGE_SLOTS, pages_of(stop)):
                rows = min(stop, (number + 1) * PAGE_SLOTS) - max(first, number * PAGE_SLOTS)
                pages += [table.pages[number - table.first]] * rows
        return pages


def _check_floats(**tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise ValueError(f"{name} is of {tensor.dtype}: it must have floating-point numbers")


def _placed(tensor: torch.Tensor, at: int, end: int, size: int) -> torch.Tensor:
    """A tensor `[K, size, D]` that holds `[K, n, D]` from position `at` to before `end`, and zeros elsewhere.

    What a page holds beyond the end may be anything, infinite or no number at all: it is overwritten, not multiplied.
    """
    if at == 0 and tensor.shape[1] >= size:
        whole = tensor[:, :size]
        if end < size:
            whole[:, max(0, end) :] = 0
        return whole
    placed = tensor.new_zeros(tensor.shape[0], size, tensor.shape[2])
    stop = min(end, at + tensor.shape[1])
    if at < stop:
        placed[:, at:stop] = tensor[:, : stop - at]
    return placed
