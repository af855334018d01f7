r"""Query heads that share keys and values: what attention over pages and attention over tensors are both made of.

    MHA: num_kv_heads = num_heads      GQA: some share             MQA: num_kv_heads = 1

    Q  o o o o o o o o                 Q  o o o o o o o o          Q  o o o o o o o o
       | | | | | | | |                     \|  |/  \|  |/             \ \ \ \/ / / /
    KV o o o o o o o o                 KV   o      o               KV       o

Query head h reads KV head h // group_size: neighbours share. The cache holds KV heads only, so it shrinks by group_size
(arXiv 2305.13245, arXiv 1911.02150).
"""

from __future__ import annotations

import torch
from torch import nn

from kvist.attention.rope import apply_rope
from kvist.checks import check_integer
from kvist.errors import OptionError
from kvist.kernels.plain_linear import Linear

Rope = tuple[torch.Tensor, torch.Tensor]
"""Cosine and sine of each token's angles, as `rope_tables` gives them."""


class AttentionHeads(nn.Module):
    """From hidden states to queries, keys and values, and back from what attention made of them.

    Args:
        embed_dim: `E`.
        num_heads: `H`, query heads.
        num_kv_heads: `K`, a divisor of `H`.
        head_dim: `D`.
        scale: multiplies the scores.
        qkv_bias: whether the projections to queries, keys and values add a bias.
        output_bias: whether the projection back does.
        q_norm, k_norm: norms over the head dim of queries and keys, if any.
        kv_dim: width of what keys and values are made of; by default `E`.

    Raises:
        OptionError: a number is below 1, or `num_kv_heads` does not divide `num_heads`.
    """

    def __init__(
        self,
        *,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        qkv_bias: bool = False,
        output_bias: bool = False,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
        kv_dim: int | None = None,
    ) -> None:
        super().__init__()
        check_head_counts(num_heads, num_kv_heads)
        self.embed_dim = check_integer("embed_dim", embed_dim, 1)
        self.kv_dim = self.embed_dim if kv_dim is None else check_integer("kv_dim", kv_dim, 1)
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = check_integer("head_dim", head_dim, 1)
        self.scale = scale
        self.q_proj = Linear(embed_dim, num_heads * head_dim, bias=qkv_bias)
        self.k_proj = Linear(self.kv_dim, num_kv_heads * head_dim, bias=qkv_bias)
        self.v_proj = Linear(self.kv_dim, num_kv_heads * head_dim, bias=qkv_bias)
        self.o_proj = Linear(num_heads * head_dim, embed_dim, bias=output_bias)
        self.q_norm = q_norm
        self.k_norm = k_norm

    def project(self, x: torch.Tensor, rope: Rope | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries `[..., H, D]`, keys and values `[..., K, D]` of tokens `x` `[..., E]`, as attention takes them."""
        return self.queries(x, rope), *self.keys_and_values(x, rope)

    def queries(self, x: torch.Tensor, rope: Rope | None) -> torch.Tensor:
        """Queries `[..., H, D]` of tokens `x` `[..., E]`, normed and turned; not turned without `rope`."""
        return _turned(self.q_proj(x).unflatten(-1, (-1, self.head_dim)), self.q_norm, rope)

    def keys_and_values(self, x: torch.Tensor, rope: Rope | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[..., K, D]` of `x` `[..., kv_dim]`; keys are normed and turned as queries are."""
        k = _turned(self.k_proj(x).unflatten(-1, (-1, self.head_dim)), self.k_norm, rope)
        return k, self.v_proj(x).unflatten(-1, (-1, self.head_dim))

    def output(self, mixed: torch.Tensor) -> torch.Tensor:
        """`[..., E]` from the heads' results `[..., H, D]`."""
        y: torch.Tensor = self.o_proj(mixed.flatten(-2))
        return y


def check_head_counts(num_heads: int, num_kv_heads: int) -> None:
    """Raise `OptionError` where KV heads cannot be shared evenly, naming the numbers that can."""
    check_integer("num_heads", num_heads, 1)
    check_integer("num_kv_heads", num_kv_heads, 1)
    if num_heads % num_kv_heads:
        divisors = [str(number) for number in range(1, num_heads + 1) if num_heads % number == 0]
        raise OptionError(
            f"num_kv_heads is {num_kv_heads}: it must divide the {num_heads} query heads: choose "
            f"{', '.join(divisors[:-1])} or {divisors[-1]}"
            if len(divisors) > 1
            else f"num_kv_heads is {num_kv_heads}: with one query head it must be 1"
        )


def _turned(heads: torch.Tensor, norm: nn.Module | None, rope: Rope | None) -> torch.Tensor:
    normed = heads if norm is None else norm(heads)
    return normed if rope is None else apply_rope(normed, rope)
