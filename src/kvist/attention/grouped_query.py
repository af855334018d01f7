"""Grouped-query attention as a module over padded tensors: it trains, and it decodes from a cache."""

from __future__ import annotations

import torch
from torch import nn

from kvist.attention.grouped import grouped_attention
from kvist.attention.heads import AttentionHeads, Rope
from kvist.attention.layer_cache import ContiguousCache, EncoderCache
from kvist.attention.paged_cache import PagedCache
from kvist.attention.rope import inverse_frequencies, rope_tables
from kvist.checks import check_integer, check_number
from kvist.config import RopeConfig
from kvist.errors import OptionError, StateError

LayerCache = ContiguousCache | PagedCache
"""What a layer keeps of the tokens so far."""

_NO_COMMON_POSITIONS = "cross-attention has no common positions to turn by: make the module without rope"


class GroupedQueryAttention(AttentionHeads):
    """Attention in which query heads share keys and values: MHA, GQA and MQA by the number of KV heads.

    Without a cache `x` is a whole sequence. With one, `x` goes on where the cache ends, and sees all that it holds:

        y, cache = attention(prompt)          # [B, 4, E], a cache of 4 tokens
        y, cache = attention(token, cache)    # [B, 1, E], a cache of 5

    Args:
        embed_dim: `E`.
        num_heads: `H`, query heads.
        num_kv_heads: `K`, a divisor of `H`: `H` itself is MHA (arXiv 1706.03762), 1 is MQA (arXiv 1911.02150), and
            what lies between is GQA (arXiv 2305.13245).
        head_dim: `D`; by default `E / H`.
        bias: whether the four projections add one.
        dropout: the share of attention weights that is dropped in training.
        causal: whether a token sees none after it. Without, there is no going on from a cache.
        rope: turns queries and keys by their positions; None does not.
        scale: multiplies the scores; by default `1 / sqrt(D)`.
        q_norm, k_norm: norms over the head dim of queries and keys, if any.
        kv_dim: width of the encoder's output that `encode` takes; by default `E`. With another there is
            cross-attention alone.

    Raises:
        OptionError: a number is out of range, `num_kv_heads` does not divide `num_heads`, `head_dim` is left out where
            `num_heads` does not divide `embed_dim`, or there is `rope` and `head_dim` is odd or `kv_dim` not `E`.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int | None = None,
        bias: bool = False,
        *,
        dropout: float = 0.0,
        causal: bool = True,
        rope: RopeConfig | None = None,
        scale: float | None = None,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
        kv_dim: int | None = None,
    ) -> None:
        head_dim = (
            default_head_dim(embed_dim, num_heads) if head_dim is None else check_integer("head_dim", head_dim, 1)
        )
        super().__init__(
            embed_dim=embed_dim,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5 if scale is None else scale,
            qkv_bias=bias,
            output_bias=bias,
            q_norm=q_norm,
            k_norm=k_norm,
            kv_dim=kv_dim,
        )
        if rope is not None and head_dim % 2:
            raise OptionError(f"head_dim is {head_dim}: rope turns pairs of dims, so it must be even")
        if rope is not None and self.kv_dim != embed_dim:
            raise OptionError(_NO_COMMON_POSITIONS)
        self.dropout = check_number("dropout", dropout, 0, 1)
        self.causal = causal
        self.rope = rope
        self._frequencies: dict[torch.device, torch.Tensor] = {}

    def forward(
        self,
        x: torch.Tensor,
        cache: LayerCache | EncoderCache | None = None,
        positions: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, LayerCache | EncoderCache]:
        """Attention of new tokens over themselves and what the cache holds.

        Args:
            x: `[B, L, E]`.
            cache: of the tokens before; None: there are none. An `EncoderCache` makes it cross-attention: all tokens
                see all that the encoder gave, and the cache stays as it is.
            positions: `[L]` or `[B, L]` integers, by which rope turns; by default each row counts its tokens, padding
                left out, on from those in the cache.
            mask: bool. `[B, L]`: which of `x` are tokens and not padding, on whichever side; the cache remembers it.
                Or `[B, L, S]`, `S` being the cache's tokens and these: which sees which, on top of causality.

        Returns:
            `[B, L, E]`, zeros for padding and for tokens that see nothing; and the cache with these tokens.

        Raises:
            OptionError: a tensor is not of its shape, or asks for what this module does not do.
            StateError: gradients or dropout are asked for over pages.
            ReservationError: the pages are full.
        """
        self._check(x, cache, mask)
        real, sees = (mask, None) if mask is None or mask.dim() == 2 else (None, mask)
        if real is not None:
            x = x.masked_fill(~real.unsqueeze(-1), 0)  # whatever padding holds, NaN included
        if isinstance(cache, EncoderCache):
            if positions is not None:
                raise OptionError("positions are for rope, which cross-attention has none of: leave them out")
            visible = _both(None if cache.mask is None else cache.mask.unsqueeze(1), sees)
            if visible is None and cache.keys.shape[2] == 0:
                visible = x.new_zeros(1, 1, 0, dtype=torch.bool)  # nothing is seen
            mixed = self._mixed(self.queries(x, None), cache.keys, cache.values, visible)
            return self._finish(mixed, real, visible), cache
        q, k, v = self.project(x, self._rope_of(x, cache, positions, real))
        if isinstance(cache, PagedCache):
            mixed = cache.append_and_attend(q, k, v, real, scale=self.scale)
            return self._finish(mixed, real, None), cache
        if cache is None:
            cache = ContiguousCache.empty(len(x), self.num_kv_heads, self.head_dim, dtype=k.dtype, device=k.device)
        cache = cache.appended(k, v, real)
        visible = _both(self._causal(x, cache), None if cache.mask is None else cache.mask.unsqueeze(1))
        visible = _both(visible, sees)
        return self._finish(self._mixed(q, cache.keys, cache.values, visible), real, visible), cache

    def encode(self, states: torch.Tensor, mask: torch.Tensor | None = None) -> EncoderCache:
        """The keys and values of an encoder's output, for cross-attention: computed once, for every step after.

        Args:
            states: `[B, S, kv_dim]`.
            mask: `[B, S]` bool, which of them are no padding; None: all.

        Raises:
            OptionError: a tensor is not of its shape, or the module turns by positions.
        """
        if self.rope is not None:
            raise OptionError(_NO_COMMON_POSITIONS)
        _check_width("states", states, "B, S, kv_dim", self.kv_dim)
        if mask is not None:
            check_mask(mask, states.shape[:2])
            states = states.masked_fill(~mask.unsqueeze(-1), 0)
        k, v = self.keys_and_values(states, None)
        return EncoderCache(k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous(), mask)

    def _mixed(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
        dropout = self.dropout if self.training else 0.0
        return grouped_attention(q, k, v, visible, scale=self.scale, dropout=dropout)

    def _finish(self, mixed: torch.Tensor, real: torch.Tensor | None, visible: torch.Tensor | None) -> torch.Tensor:
        """Back to `[B, L, E]`, with zeros for padding and where nothing was seen, whatever a bias adds."""
        y = self.output(mixed)
        kept = _both(real, None if visible is None else visible.any(-1))
        return y if kept is None else y.masked_fill(~kept.unsqueeze(-1), 0)

    def _causal(self, x: torch.Tensor, cache: ContiguousCache) -> torch.Tensor | None:
        """Which of the cache's tokens the last `L` of them see, `[1, L, S]`; None where each sees all."""
        length, total = x.shape[1], cache.length
        if not self.causal or length == 1:
            return None
        # Query i stands at place `total - length + i`: what was in the cache before is seen by all.
        return x.new_ones(1, length, total, dtype=torch.bool).tril(total - length)

    def _rope_of(
        self, x: torch.Tensor, cache: LayerCache | None, positions: torch.Tensor | None, real: torch.Tensor | None
    ) -> Rope | None:
        if self.rope is None:
            if positions is not None:
                raise OptionError("positions are for rope, which this module has none of: give it rope=RopeConfig(1e4)")
            return None
        if positions is None:
            positions = default_positions(x, cache, real)
        elif positions.shape not in (x.shape[:2], x.shape[1:2]):
            raise OptionError(
                f"positions are {tuple(positions.shape)}: they must be {tuple(x.shape[1:2])} or {tuple(x.shape[:2])}"
            )
        if x.device not in self._frequencies:
            self._frequencies[x.device] = inverse_frequencies(self.rope, self.head_dim, x.device)
        return rope_tables(self._frequencies[x.device], positions.to(x.device), x.dtype)

    def _check(self, x: torch.Tensor, cache: LayerCache | EncoderCache | None, mask: torch.Tensor | None) -> None:
        _check_width("x", x, "B, L, E", self.embed_dim)
        if self.kv_dim != self.embed_dim and not isinstance(cache, EncoderCache):
            raise OptionError(
                f"keys and values are made of an encoder's output of width {self.kv_dim}, not of x: give the cache "
                "that encode() returns"
            )
        fits = (len(x), self.num_kv_heads, self.head_dim)
        if cache is not None and cache.rows != fits:
            raise OptionError(f"the cache has (B, K, D) = {cache.rows}: with x and this module they are {fits}")
        if not self.causal and isinstance(cache, ContiguousCache | PagedCache):
            raise OptionError("without causality earlier tokens would see new ones: give whole sequences and no cache")
        if isinstance(cache, PagedCache) and self.training and self.dropout:
            raise StateError("a paged cache is read without dropout: call eval() first")
        if mask is None:
            return
        shapes = [x.shape[:2]]
        if not isinstance(cache, PagedCache):
            before = 0 if cache is None else cache.length
            seen = before if isinstance(cache, EncoderCache) else before + x.shape[1]
            shapes.append(torch.Size((*x.shape[:2], seen)))
        check_mask(mask, *shapes)


def check_mask(mask: torch.Tensor, *shapes: torch.Size) -> None:
    """Raise `OptionError` unless a mask is bool and of one of the shapes."""
    if mask.dtype != torch.bool or mask.shape not in shapes:
        possible = " or ".join(str(tuple(shape)) for shape in shapes)
        raise OptionError(f"mask is {tuple(mask.shape)} {mask.dtype}: it must be bool, {possible}")


def default_head_dim(embed_dim: int, num_heads: int) -> int:
    """`E / H`, or `OptionError` where that is no whole number."""
    check_integer("embed_dim", embed_dim, 1)
    check_integer("num_heads", num_heads, 1)
    if embed_dim % num_heads:
        raise OptionError(f"embed_dim {embed_dim} does not divide by {num_heads} heads: give head_dim")
    return embed_dim // num_heads


def default_positions(x: torch.Tensor, cache: LayerCache | None, real: torch.Tensor | None) -> torch.Tensor:
    """The positions of new tokens, `[L]` or `[B, L]`: each row counts its tokens on, and padding is not counted.

    Args:
        x: `[B, L, ...]`, the new tokens.
        cache: of those before.
        real: `[B, L]` bool, which of `x` are no padding; None: all.
    """
    new = torch.arange(x.shape[1], device=x.device) if real is None else (real.cumsum(1) - 1).clamp(min=0)
    return new if cache is None else new + cache.num_tokens().to(x.device).unsqueeze(1)


def _check_width(name: str, x: torch.Tensor, dims: str, width: int) -> None:
    """Raise `OptionError` unless a tensor has three dims, `dims` by name, of which the last is `width`."""
    if x.dim() != 3 or x.shape[2] != width:
        raise OptionError(f"{name} is {tuple(x.shape)}: it must be [{dims}] with {dims.split()[-1]} = {width}")


def _both(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one & other
