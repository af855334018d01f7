"""The KV cache that the engine sees: sequences whose keys and values lie in pages, within one budget of bytes.

                        full attention           window of 512
    sequence 0   table  [p0 p1 p4 p5 p6]         [ .  .  . p2 p3]        a table per sequence and layer group
    sequence 1   table  [p0 p1 p2 p3]            [p0 p1 p4]              p0, p1: shared with the fork it came from
                           |                        |
                 pool   |p0|p1|p2|p3|p4|...      |p0|p1|p2|p3|p4|...     a pool per layer group

The engine opens a sequence, reserves room, asks for the view of a step and commits it when the step is through; the
layers write to the view and read from it.

The account is the sum of two things, over all groups: the pages in use, each counted once however many share it, and
the pages promised, those that sequences may still take to grow to what they have reserved. `reserve`, `fork` and
`rewind` are refused, and change nothing, where the account would exceed the budget. A step takes only pages that are
promised. So a sequence that has reserved its room can always go on, and a step never fails half-way for want of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvist.cache.cache_view import CachedSequence, CacheGroup, CacheView, Span
from kvist.cache.native_pages import NativePages
from kvist.cache.page_codec import PageCodec
from kvist.cache.page_pool import PagePool
from kvist.cache.page_table import PageTable
from kvist.cache.plan import CachePlan
from kvist.checks import check_integer, in_words, is_integer
from kvist.config import CacheConfig, LayerConfig
from kvist.errors import CacheFullError, ReservationError, RewindError, SequenceError
from kvist.kernels.key_statics import KeyStatics
from kvist.kv_format import KVFormat, LayerFormats

__all__ = ["CacheView", "KVCache", "Span"]


class KVCache:
    """Keys and values of all open sequences, within one budget of bytes.

    Args:
        layers: the shape of each layer's cache.
        config: storage format, budget, and what windows keep.
        device: where the pages are.
        key_statics: for each layer, what its quantised keys are coded with; plain keys need none.
        native: whether native kernels work on pages on the CPU; else their twins in PyTorch do, as on other devices.

    Attributes:
        layers, config, device: as given.
        formats: how each layer is stored.
        plan: what sequences cost.
        groups: the layer groups with their pools, full attention first, then the windows, ascending.
        bytes_per_token: of one token's slots over all layers.

    Raises:
        OptionError: there are no layers, the budget is less than one page of each group, or the format cannot take a
            head dim.
        CacheFullError: the system grants no address range of the budget's size.
        ValueError: a layer has quantised keys and no statics, or there are statics of another number of layers.
    """

    def __init__(
        self,
        layers: Sequence[LayerConfig],
        config: CacheConfig,
        device: torch.device | str = "cpu",
        *,
        key_statics: Sequence[KeyStatics | None] | None = None,
        native: bool = True,
    ) -> None:
        self.layers = tuple(layers)
        self.config = config
        self.device = torch.device(device)
        self.plan = CachePlan.checked(self.layers, config)
        self.formats = config.kv_format.of(len(self.layers))
        self.bytes_per_token = self.plan.bytes_per_token
        statics = _checked_statics(self.formats, key_statics, self.device)
        self.groups = _groups(self.plan, statics, config, self.device, native=native)
        self._sequences: dict[int, CachedSequence] = {}
        self._next_id = 0

    @classmethod
    def for_run(
        cls,
        layers: Sequence[LayerConfig],
        kv_format: LayerFormats,
        num_tokens: int,
        device: torch.device | str = "cpu",
        *,
        max_step_tokens: int,
        key_statics: Sequence[KeyStatics | None] | None = None,
        native: bool = True,
    ) -> KVCache:
        """A cache for one run over `num_tokens`, and no page more. It keeps no slack to rewind.

        Memory stands behind it only while a sequence has pages. The other arguments, and what is raised, are those of
        `KVCache` and `CacheConfig`.
        """
        needed = CachePlan(layers, kv_format, 0, max_step_tokens).bytes_for(num_tokens)
        config = CacheConfig(kv_format, needed, 0, max_step_tokens)
        return cls(layers, config, device, key_statics=key_statics, native=native)

    # --- the account --------------------------------------------------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages in use and of those promised to sequences: at most the budget."""
        return self._account()

    @property
    def max_tokens(self) -> int:
        """The most tokens that one sequence can have when nothing else is open.

        `sys.maxsize` where all layers have windows and the budget holds them, since then it has no end.
        """
        return self.plan.max_tokens(self.config.memory_bytes)

    def bytes_for(self, num_tokens: int) -> int:
        """The most bytes that a sequence takes at once while it grows from nothing to `num_tokens`."""
        return self.plan.bytes_for(num_tokens)

    def sequence_bytes(self, sequence_id: int) -> int:
        """Bytes of the pages that a sequence has, those that it shares counted in full."""
        return sum(table.num_bytes for table in self._open_sequence(sequence_id).tables)

    # --- sequences ----------------------------------------------------------------------------------------------------

    def open(self) -> int:
        """Start an empty sequence and return its id. It has no pages until a step writes to it."""
        return self._add(CachedSequence(tuple(PageTable(group.pool, group.rules) for group in self.groups)))

    def length(self, sequence_id: int) -> int:
        """Tokens whose keys and values are committed."""
        return self._open_sequence(sequence_id).length

    def reserve(self, sequence_id: int, num_tokens: int, *, rewind_to: int | None = None) -> bool:
        """Promise a sequence the pages for `num_tokens`; False, and nothing changed, where the budget lacks them.

        What is reserved already stays reserved.

        Args:
            sequence_id: whose.
            num_tokens: in all, those it has included.
            rewind_to: rewind the sequence to there first, as `rewind` does. Both is done, or neither.

        Raises:
            RewindError: as `rewind`.
        """
        sequence = self._open_sequence(sequence_id)
        num_tokens = check_integer("num_tokens", num_tokens, 0)
        length = None if rewind_to is None else self._rewound_length(sequence, rewind_to)
        reserved = max(_reserved_at(sequence, length), num_tokens)
        if self._exceeds(sequence, reserved, length):
            return False
        if length is not None:
            _rewind(sequence, length)
        sequence.reserved = reserved
        return True

    def unreserve(self, sequence_id: int) -> None:
        """Give up what a sequence has reserved, and the pages beyond its tokens."""
        sequence = self._open_sequence(sequence_id)
        sequence.reserved = sequence.length
        _rewind(sequence, sequence.length)

    def view(self, spans: Sequence[Span]) -> CacheView:
        """The view of one step: each span's tokens follow those committed in its sequence.

        Pages are taken here, for all spans or, where one of them cannot be, for none. A span may be empty, to read.

        Raises:
            SequenceError: a sequence is not open, or appears twice.
            ReservationError: a span is longer than `max_step_tokens`, or than what its sequence has reserved.
        """
        sequences = [self._open_sequence(span.sequence_id) for span in spans]
        if len({span.sequence_id for span in spans}) != len(spans):
            raise SequenceError("a sequence appears twice in one step: give its tokens as one span")
        for span, sequence in zip(spans, sequences, strict=True):
            self._check_span(span, sequence)
        for span, sequence in zip(spans, sequences, strict=True):
            if span.num_tokens:
                sequence.changes += 1
                for table in sequence.tables:
                    table.prepare(sequence.length, sequence.length + span.num_tokens)
        return CacheView(self.groups, spans, sequences, self.device)

    def commit(self, view: CacheView) -> None:
        """Count the tokens written through `view`. A step that fails before this leaves every sequence as it was.

        Pages that no query will see any more are given back.

        Raises:
            SequenceError: the view is of no use any more, as in `CacheView.write`, or is of another cache. Nothing
                changed.
        """
        view.check_current()
        if view.groups is not self.groups:
            raise SequenceError("the view is of another cache: commit it there")
        for span, sequence in zip(view.spans, view.sequences, strict=True):
            if span.num_tokens:
                sequence.changes += 1
                sequence.length += span.num_tokens
                for table in sequence.tables:
                    table.drop_unneeded(sequence.length)

    def fork(self, sequence_id: int) -> int:
        """Start a sequence with the same tokens, which shares their pages; return its id.

        The fork has nothing reserved. Whichever of the two is first to write to the page that its next token belongs
        to gets a copy of it. Where the sequence itself has room reserved, that copy is promised to it here.

        Raises:
            CacheFullError: the budget has no room for that promise. Nothing has changed.
        """
        sequence = self._open_sequence(sequence_id)
        fork = CachedSequence(
            tuple(table.fork(sequence.length) for table in sequence.tables), sequence.length, sequence.length
        )
        excess = self._account() - self.config.memory_bytes
        if excess > 0:
            _rewind(fork, 0)
            raise CacheFullError(
                f"cannot fork sequence {sequence_id}: it may grow to {sequence.reserved:,} tokens without the pages "
                f"that it would share, which takes {excess:,} bytes more than the cache has free: give up what it has "
                "reserved, release another sequence or raise kv_memory"
            )
        return self._add(fork)

    def rewind(self, sequence_id: int, length: int) -> int:
        """Forget all tokens from position `length` on, and those before it that cannot be gone on from.

        The sequence ends at the longest length up to `length` at which every group has what the next query sees. A
        window that has moved on has lost what came before it: further back than `rewind_slack_tokens` from the longest
        that the sequence has been, it may end at 0, where no query needs anything. It need not, since pages are kept
        whole: with a window of 100 and a slack of 64, 1,000 tokens can be rewound by 69, to 931, and by 70 end at 0.

        What is reserved beyond the sequence's tokens stays reserved.

        Returns:
            The length that it has now.

        Raises:
            RewindError: `length` is negative or more than the sequence holds.
            CacheFullError: the sequence shares pages and has room reserved, and the budget lacks pages for it to go on
                without those it would give up. Nothing has changed. `unreserve` it first.
        """
        sequence = self._open_sequence(sequence_id)
        kept = self._rewound_length(sequence, length)
        reserved = _reserved_at(sequence, kept)
        if self._exceeds(sequence, reserved, kept):
            raise CacheFullError(
                f"cannot rewind to {length:,} with room for {sequence.reserved:,} tokens reserved: the sequence would "
                "give up pages that others share and need new ones, more than the cache has free: unreserve it first"
            )
        _rewind(sequence, kept)
        sequence.reserved = reserved
        return kept

    def release(self, sequence_id: int) -> None:
        """Close a sequence and give back its pages, where nobody shares them, and what it has reserved."""
        sequence = self._open_sequence(sequence_id)
        sequence.reserved = 0
        _rewind(sequence, 0)
        del self._sequences[sequence_id]

    # --- inside -------------------------------------------------------------------------------------------------------

    def _open_sequence(self, sequence_id: int) -> CachedSequence:
        if not is_integer(sequence_id):
            raise SequenceError(f"{in_words(sequence_id)} is no sequence of this cache: `open` gives their numbers")
        try:
            return self._sequences[sequence_id]
        except KeyError:
            known = "was released" if 0 <= sequence_id < self._next_id else "was never opened"
            raise SequenceError(f"sequence {in_words(sequence_id)} is not open in this cache: it {known}") from None

    def _add(self, sequence: CachedSequence) -> int:
        sequence_id = self._next_id
        self._next_id += 1
        self._sequences[sequence_id] = sequence
        return sequence_id

    def _check_span(self, span: Span, sequence: CachedSequence) -> None:
        check_integer(f"num_tokens of sequence {span.sequence_id}", span.num_tokens, 0)
        if span.num_tokens > self.config.max_step_tokens:
            raise ReservationError(
                f"sequence {span.sequence_id}: {span.num_tokens:,} tokens in one step, and a step takes "
                f"max_step_tokens, {self.config.max_step_tokens:,}, at most: split it"
            )
        if sequence.length + span.num_tokens > sequence.reserved:
            raise ReservationError(
                f"sequence {span.sequence_id}: no room reserved for {span.num_tokens:,} more tokens: it has "
                f"{sequence.length:,} and has reserved {sequence.reserved:,}"
            )

    def _rewound_length(self, sequence: CachedSequence, length: int) -> int:
        if not is_integer(length):
            raise RewindError(f"cannot rewind to {in_words(length)}: a length is an integer")
        if length < 0:
            raise RewindError(f"cannot rewind to {length}: a sequence starts at 0")
        if length > sequence.length:
            raise RewindError(f"cannot rewind to {length:,}: the sequence holds {sequence.length:,} tokens")
        return min(table.rewound_length(length) for table in sequence.tables)

    def _exceeds(self, sequence: CachedSequence, reserved: int, length: int | None) -> bool:
        """Whether the account would grow beyond the budget where a sequence were rewound, if `length` is given, and had
        `reserved` tokens reserved.
        """
        if length is None and reserved == sequence.reserved:
            return False
        return self._account(sequence, reserved, length) > self.config.memory_bytes

    def _account(self, changed: CachedSequence | None = None, reserved: int = 0, length: int | None = None) -> int:
        """Bytes in use and promised; where a sequence is `changed`, as they would be then."""
        total = 0
        for index, group in enumerate(self.groups):
            leaving: frozenset[int] = frozenset()
            if changed is not None and length is not None:
                leaving = frozenset(changed.tables[index].beyond(length))
            pages = group.pool.pages_in_use - sum(group.pool.owners(page) == 1 for page in leaving)
            for sequence in self._sequences.values():
                table = sequence.tables[index]
                if sequence is not changed:
                    pages += table.promise(sequence.length, sequence.reserved, leaving=leaving)
                elif length is None:
                    pages += table.promise(sequence.length, reserved)
                else:
                    pages += table.promise(length, reserved, rewound=True)
            total += pages * group.pool.stride
        return total


def _checked_statics(
    formats: Sequence[KVFormat], key_statics: Sequence[KeyStatics | None] | None, device: torch.device
) -> list[KeyStatics | None]:
    """The statics of each layer, on the device. Quantised keys without them would be coded, but worse."""
    statics = [None] * len(formats) if key_statics is None else key_statics
    if len(statics) != len(formats):
        raise ValueError(f"there are key_statics of {len(statics)} layers for {len(formats)}: give one for each layer")
    for layer, (kv_format, of_layer) in enumerate(zip(formats, statics, strict=True)):
        if of_layer is None and kv_format.quantised_keys:
            raise ValueError(
                f"layer {layer} keeps its keys in {kv_format.keys} and has no statics to code them with: pass "
                "key_statics, as LoadedModel.key_statics() gives them"
            )
    return [None if of_layer is None else of_layer.to(device) for of_layer in statics]


def _groups(
    plan: CachePlan, statics: Sequence[KeyStatics | None], config: CacheConfig, device: torch.device, *, native: bool
) -> tuple[CacheGroup, ...]:
    groups = []
    for group in plan.groups:
        codec = PageCodec(group.layout, [statics[layer] for layer in group.layer_group.layers])
        pool = PagePool(group.layout.page_bytes, config.memory_bytes // group.stride, device)
        pages = NativePages(codec, group.layer_group.window) if native and device.type == "cpu" else None
        groups.append(CacheGroup(group.layer_group, codec, pages, pool, group.rules))
    return tuple(groups)


def _reserved_at(sequence: CachedSequence, length: int | None) -> int:
    """What a sequence has reserved once it is rewound to `length`, if given: as before, and nothing if nothing."""
    return sequence.reserved if length is None or sequence.reserved > sequence.length else length


def _rewind(sequence: CachedSequence, length: int) -> None:
    sequence.changes += 1
    sequence.length = length
    # All tables agree with the length before the first call to the system, at which an interrupt may be raised.
    for table in sequence.tables:
        table.forget_from(length)
    for table in sequence.tables:
        table.give_back()
