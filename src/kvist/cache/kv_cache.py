"""The KV cache that the engine and the layers see, kept as one contiguous tensor per sequence and layer.

                    capacity
           +-----------------------+
    k   K  | written |  this step  | spare      [K, capacity, D] per layer; v likewise
           +-----------------------+
            0..length  view(spans)

The engine opens a sequence, reserves room, asks for the view of a step and commits it when the step is through; the
layers write to the view and read from it. Keys and values are never expanded to all query heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from kvist.config import CacheConfig, LayerConfig

STORAGE_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

# A sequence grows by at least this many tokens and by half of itself, so that a token costs no copy of the others.
_LEAST_GROWTH = 64


def kv_bytes_per_token(layers: Sequence[LayerConfig], kv_format: str) -> int:
    """Bytes of keys and values of one token over all layers."""
    scalars = sum(2 * layer.num_kv_heads * layer.head_dim for layer in layers)
    return scalars * STORAGE_DTYPES[kv_format].itemsize


@dataclass(frozen=True)
class Span:
    """A run of consecutive new tokens of one sequence in a step."""

    sequence_id: int
    num_tokens: int


class _Storage:
    """One sequence's keys and values. `length` tokens are committed, `capacity` fit into every layer."""

    def __init__(self, layers: Sequence[LayerConfig], dtype: torch.dtype, device: torch.device) -> None:
        self.length = 0
        self.capacity = 0
        self.keys = [torch.empty(layer.num_kv_heads, 0, layer.head_dim, dtype=dtype, device=device) for layer in layers]
        self.values = [keys.clone() for keys in self.keys]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    def grow(self, capacity: int) -> None:
        """Make every layer's tensors hold `capacity` tokens, one after another.

        Old and new are held together for one tensor only. Where memory runs out on the way, those before stay larger
        than they need be until the next growth, and nothing is lost.
        """
        for tensors in (self.keys, self.values):
            for layer, old in enumerate(tensors):
                if old.shape[1] != capacity:
                    grown = old.new_empty(old.shape[0], capacity, old.shape[2])
                    grown[:, : self.length] = old[:, : self.length]
                    tensors[layer] = grown
        self.capacity = capacity


class KVCache:
    """Keys and values of all open sequences, within one budget of bytes.

    Args:
        layers: the shape of each layer's cache.
        config: storage format and budget.
        device: where the tensors live.
    """

    def __init__(self, layers: Sequence[LayerConfig], config: CacheConfig, device: torch.device | str = "cpu") -> None:
        self.layers = tuple(layers)
        self.config = config
        self.device = torch.device(device)
        self.dtype = STORAGE_DTYPES[config.kv_format]
        self.bytes_per_token = kv_bytes_per_token(self.layers, config.kv_format)
        self._sequences: dict[int, _Storage] = {}
        self._next_id = 0
        self._used_bytes = 0  # kept, not summed up: any thread may ask while another opens and closes sequences

    @property
    def used_bytes(self) -> int:
        """Bytes that the open sequences hold, spare room included. Any thread may ask at any time."""
        return self._used_bytes

    @property
    def max_tokens(self) -> int:
        """The most tokens that fit into the budget when nothing else is open."""
        return self.config.memory_bytes // self.bytes_per_token

    def open(self) -> int:
        """Start an empty sequence and return its id. It holds nothing until room is reserved."""
        sequence_id = self._next_id
        self._next_id += 1
        self._sequences[sequence_id] = _Storage(self.layers, self.dtype, self.device)
        return sequence_id

    def length(self, sequence_id: int) -> int:
        """Tokens whose keys and values are committed."""
        return self._storage(sequence_id).length

    def capacity(self, sequence_id: int) -> int:
        """Tokens that there is room for, those committed included."""
        return self._storage(sequence_id).capacity

    def reserve(self, sequence_id: int, num_tokens: int) -> bool:
        """Make room for `num_tokens` in all; False, and nothing changed, when the budget does not allow it.

        Raises:
            RuntimeError, MemoryError: the machine has no memory left. The sequence keeps its tokens and its room.
        """
        storage = self._storage(sequence_id)
        if num_tokens <= storage.capacity:
            return True
        held_bytes = storage.num_bytes
        largest = (self.config.memory_bytes - self._used_bytes + held_bytes) // self.bytes_per_token
        if num_tokens > largest:
            return False
        grown = storage.capacity + max(_LEAST_GROWTH, storage.capacity // 2) if storage.capacity else 0
        try:
            storage.grow(min(max(num_tokens, grown), largest))
        finally:
            self._used_bytes += storage.num_bytes - held_bytes
        return True

    def view(self, spans: Sequence[Span]) -> CacheView:
        """The view of one step: each span's tokens follow those committed in its sequence. Room must be reserved."""
        if len({span.sequence_id for span in spans}) != len(spans):
            raise ValueError("a sequence appears twice in one step")
        return CacheView(self.device, spans, [self._storage(span.sequence_id) for span in spans])

    def commit(self, view: CacheView) -> None:
        """Count the tokens written through `view`. A step that fails before this leaves every sequence as it was."""
        for span, storage in zip(view.spans, view.storages, strict=True):
            storage.length += span.num_tokens

    def rewind(self, sequence_id: int, length: int) -> None:
        """Forget all tokens from position `length` on. It must not exceed the sequence's length."""
        storage = self._storage(sequence_id)
        if not 0 <= length <= storage.length:
            raise ValueError(f"cannot rewind to {length}: the sequence holds {storage.length} tokens")
        storage.length = length

    def release(self, sequence_id: int) -> None:
        """Close a sequence and give its memory back."""
        storage = self._storage(sequence_id)
        del self._sequences[sequence_id]
        self._used_bytes -= storage.num_bytes

    def _storage(self, sequence_id: int) -> _Storage:
        try:
            return self._sequences[sequence_id]
        except KeyError:
            raise KeyError(f"sequence {sequence_id} is not open in this cache") from None


class CacheView:
    """What the layers of one step write to and read from.

    Attributes:
        spans: the step's runs of tokens, in the order in which they are packed into `T`.
        row_starts: for each span, its first row in `T`.
        first_positions: for each span, the position of its first token in its sequence.
    """

    def __init__(self, device: torch.device, spans: Sequence[Span], storages: Sequence[_Storage]) -> None:
        self.device = device
        self.spans = tuple(spans)
        self.storages = tuple(storages)
        self.first_positions = tuple(storage.length for storage in storages)
        self.row_starts = tuple(accumulate((span.num_tokens for span in spans), initial=0))[:-1]
        for span, storage in zip(spans, storages, strict=True):
            if storage.length + span.num_tokens > storage.capacity:
                raise ValueError(f"sequence {span.sequence_id}: no room reserved for {span.num_tokens} more tokens")

    @property
    def num_tokens(self) -> int:
        return sum(span.num_tokens for span in self.spans)

    def positions(self) -> torch.Tensor:
        """Each token's position in its own sequence, `[T]` int64."""
        runs = [
            torch.arange(first, first + span.num_tokens, device=self.device)
            for first, span in zip(self.first_positions, self.spans, strict=True)
        ]
        return torch.cat(runs)

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store this step's keys and values `[T, K, D]` of a layer, in the cache's format."""
        for span, row, first, storage in zip(
            self.spans, self.row_starts, self.first_positions, self.storages, strict=True
        ):
            rows, slots = slice(row, row + span.num_tokens), slice(first, first + span.num_tokens)
            storage.keys[layer][:, slots] = k[rows].transpose(0, 1)
            storage.values[layer][:, slots] = v[rows].transpose(0, 1)

    def read(self, layer: int, index: int, start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[K, L - start, D]` of span `index`'s sequence, from position `start` to this step's last."""
        storage = self.storages[index]
        stop = self.first_positions[index] + self.spans[index].num_tokens
        return storage.keys[layer][:, start:stop], storage.values[layer][:, start:stop]
