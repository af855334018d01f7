"""Attention through PyTorch's fused kernel, which keeps no scores in memory."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvist.kernels.reference import visible


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, window: int | None = None
) -> torch.Tensor:
    """The same as `reference.attention`, computed in the dtype of the keys and values."""
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads, num_keys, _ = k.shape
    group_size = num_heads // num_kv_heads
    # KV heads as the batch and the queries of a group as its heads: keys and values are shared by stride, not copied.
    grouped = q.view(num_queries, num_kv_heads, group_size, head_dim).permute(1, 2, 0, 3)
    shared = (num_kv_heads, group_size, num_keys, head_dim)
    causal = num_queries == num_keys and (window is None or window >= num_keys)
    sees_all = num_queries == 1 and (window is None or window >= num_keys)
    mask = None if causal or sees_all else visible(num_queries, num_keys, window, q.device)
    mixed = scaled_dot_product_attention(
        grouped.to(k.dtype),
        k.unsqueeze(1).expand(shared),
        v.unsqueeze(1).expand(shared),
        attn_mask=mask,
        is_causal=causal and not sees_all,
        scale=scale,
    )
    return mixed.permute(2, 0, 1, 3).reshape(num_queries, num_heads, head_dim).to(q.dtype)
