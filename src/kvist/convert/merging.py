"""Merging KV heads by their weights alone, and the way back."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvist.convert.attention_weights import AttentionWeights


def first_of_each(weights: AttentionWeights, num_kv_heads: int) -> AttentionWeights:
    """The first KV head of each group of neighbours stays; the query heads of the others read it too."""
    merged = weights.num_kv_heads // num_kv_heads
    return replace(weights, key=weights.key[::merged], value=weights.value[::merged])


def mean_of_each(weights: AttentionWeights, num_kv_heads: int) -> AttentionWeights:
    """Each group of neighbouring KV heads becomes its mean: the conversion of the GQA paper (arXiv 2305.13245)."""
    return replace(weights, key=mean_heads(weights.key, num_kv_heads), value=mean_heads(weights.value, num_kv_heads))


def mean_heads(heads: torch.Tensor, num_heads: int) -> torch.Tensor:
    """`[num_heads, ...]` of `heads`, in their dtype. The mean of equal numbers is that number, to the bit.

    The sum is float64, which holds that of some equal numbers of fewer digits exactly, and begins with the first head:
    zero plus a negative zero would be a positive one.
    """
    groups = heads.reshape(num_heads, -1, *heads.shape[1:]).double()
    total: torch.Tensor = groups[:, 0].clone()
    for member in range(1, groups.shape[1]):
        total += groups[:, member]
    return (total / groups.shape[1]).to(heads.dtype)


def expanded(weights: AttentionWeights) -> AttentionWeights:
    """Each query head gets a KV head of its own, a copy of the one that it read: the same function as MHA."""
    size = weights.group_size
    return replace(
        weights, key=weights.key.repeat_interleave(size, dim=0), value=weights.value.repeat_interleave(size, dim=0)
    )
