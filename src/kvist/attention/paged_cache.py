"""The pages of a KV cache for one layer of `GroupedQueryAttention`."""

from __future__ import annotations

import torch

from kvist.attention.attend import attend
from kvist.cache.kv_cache import KVCache, Span
from kvist.cache.plan import CachePlan
from kvist.checks import check_integer
from kvist.config import CacheConfig, LayerConfig
from kvist.errors import CacheFullError, OptionError, StateError
from kvist.kv_format import LayerFormats
from kvist.memory import binary_size


class PagedCache:
    """The keys and values of one layer in pages, a sequence for each row of the batch.

    Padding is not stored: rows of different lengths have sequences of different lengths. A step appends in place, so
    that the cache that comes back is the one that was given. Pages hold numbers and no history: nothing is trained
    through them.

    Args:
        batch: `B`.
        num_kv_heads: `K`.
        head_dim: `D`.
        max_tokens: the most that a row may grow to.
        kv_format: how they are stored, `fp32` or `bf16`; values apart from keys as in `k=bf16,v=int8`.
        device: where the pages are.

    Attributes:
        pages: the `KVCache` beneath, of one layer.

    Raises:
        OptionError: a number is below 1; or the format is unknown, cannot take the head dim, or quantises keys, which
            needs statics of a model (`kvist.LLM` has them).
        CacheFullError: the system grants no such memory.
    """

    def __init__(
        self,
        batch: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        max_tokens: int,
        kv_format: str = "fp32",
        device: torch.device | str = "cpu",
    ) -> None:
        check_integer("batch", batch, 1)
        check_integer("max_tokens", max_tokens, 1)
        layers, formats = [LayerConfig(num_kv_heads, head_dim, None)], LayerFormats.parse(kv_format)
        if any(one.quantised_keys for one in formats.of(1)):
            raise OptionError(
                f"kv_format is {kv_format}: quantised keys need statics of a trained model, which a module by itself "
                "has not: choose fp32 or bf16 for the keys"
            )
        needed = batch * CachePlan(layers, formats, 0, max_tokens).bytes_for(max_tokens)
        try:
            self.pages = KVCache(layers, CacheConfig(formats, needed, 0, max_tokens), device)
        except CacheFullError as error:
            raise CacheFullError(
                f"{batch:,} rows of {max_tokens:,} tokens take {binary_size(needed)}, and the system does not grant "
                "that: lower batch or max_tokens"
            ) from error
        self._sequences = [self.pages.open() for _ in range(batch)]
        for sequence in self._sequences:
            self.pages.reserve(sequence, max_tokens)

    @property
    def rows(self) -> tuple[int, int, int]:
        """`(B, K, D)`."""
        (layer,) = self.pages.layers
        return len(self._sequences), layer.num_kv_heads, layer.head_dim

    @property
    def length(self) -> int:
        """Tokens of the longest row."""
        return max(map(self.pages.length, self._sequences))

    @property
    def num_bytes(self) -> int:
        """Of the pages that the rows have."""
        return sum(map(self.pages.sequence_bytes, self._sequences))

    def num_tokens(self) -> torch.Tensor:
        """Of each row, `[B]` int64."""
        return torch.tensor([self.pages.length(sequence) for sequence in self._sequences], device=self.pages.device)

    def append_and_attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, *, scale: float
    ) -> torch.Tensor:
        """Store new tokens and let them attend over their rows, causally.

        Args:
            q: `[B, L, H, D]`.
            k, v: `[B, L, K, D]`.
            mask: `[B, L]` bool, which of the tokens are no padding; None: all.
            scale: multiplies the scores.

        Returns:
            `[B, L, H, D]`; zeros for padding.

        Raises:
            StateError: gradients are asked for.
            ReservationError: a row would grow beyond `max_tokens`. Nothing has changed.
        """
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            raise StateError(
                "a paged cache keeps no gradients: run under torch.no_grad(), or train over a ContiguousCache"
            )
        real = q.new_ones(q.shape[:2], dtype=torch.bool) if mask is None else mask
        counts = real.sum(1).tolist()
        view = self.pages.view([Span(*pair) for pair in zip(self._sequences, counts, strict=True)])
        view.write(0, k[real], v[real])
        mixed = torch.zeros_like(q)
        mixed[real] = attend(q[real], view, 0, scale=scale)
        self.pages.commit(view)
        return mixed
