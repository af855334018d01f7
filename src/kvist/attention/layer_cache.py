"""What a layer keeps of earlier tokens: keys and values that grow, and those of an encoder, which do not."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ContiguousCache:
    """The keys and values of one layer, as plain tensors that grow by concatenation along the length.

    Nothing is ever changed in place: a cache that is appended to stays as it was, so that it can be gone on from
    in two ways, and gradients flow through it. Each step copies all that came before; `PagedCache` does not.

    Attributes:
        keys, values: `[B, K, L, D]`, of all tokens so far.
        mask: `[B, L]` bool, which of them are tokens and not padding; None where all are.
    """

    keys: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor | None = None

    @classmethod
    def empty(
        cls,
        batch: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> ContiguousCache:
        """A cache of no tokens, `[B, K, 0, D]`."""
        keys = torch.empty(batch, num_kv_heads, 0, head_dim, dtype=dtype, device=device)
        return cls(keys, torch.empty_like(keys))

    @property
    def length(self) -> int:
        """`L`, padding included."""
        return self.keys.shape[2]

    @property
    def rows(self) -> tuple[int, int, int]:
        """`(B, K, D)`."""
        batch, num_kv_heads, _, head_dim = self.keys.shape
        return batch, num_kv_heads, head_dim

    @property
    def num_scalars(self) -> int:
        """Of keys and values: `2 * B * K * L * D`."""
        return self.keys.numel() + self.values.numel()

    def num_tokens(self) -> torch.Tensor:
        """Of each row, padding not counted, `[B]` int64."""
        if self.mask is None:
            return torch.full((len(self.keys),), self.length, device=self.keys.device)
        return self.mask.sum(1)

    def appended(self, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> ContiguousCache:
        """A cache that holds these tokens too.

        Args:
            k, v: `[B, L, K, D]`, as the projections give them.
            mask: `[B, L]` bool, which of them are no padding; None: all.
        """
        keys = torch.cat((self.keys, k.transpose(1, 2)), dim=2)
        values = torch.cat((self.values, v.transpose(1, 2)), dim=2)
        if mask is None and self.mask is None:
            return ContiguousCache(keys, values)
        earlier, new = (
            part.new_ones(part.shape[0], length, dtype=torch.bool) if known is None else known
            for part, length, known in ((self.keys, self.length, self.mask), (k, k.shape[1], mask))
        )
        return ContiguousCache(keys, values, torch.cat((earlier, new), dim=1))


@dataclass(frozen=True)
class EncoderCache:
    """The keys and values of an encoder's output, computed once, for cross-attention in every step of a decoder.

    Attributes:
        keys, values: `[B, K, S, D]`.
        mask: `[B, S]` bool, which of the encoder's tokens are no padding; None where all are.
    """

    keys: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor | None = None

    @property
    def length(self) -> int:
        """`S`, padding included."""
        return self.keys.shape[2]

    @property
    def rows(self) -> tuple[int, int, int]:
        """`(B, K, D)`."""
        batch, num_kv_heads, _, head_dim = self.keys.shape
        return batch, num_kv_heads, head_dim
