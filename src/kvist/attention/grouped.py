"""The arithmetic of grouped-query attention over tensors."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention


def grouped_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor | None,
    *,
    scale: float,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Attention in which the query heads of a group share a KV head without a copy of it.

    The queries of a group stand below one another as rows of one matrix, so that one product with the KV head's keys,
    as they lie in the cache, gives the scores of all of them. With 4 query heads over 2 KV heads:

        KV head 0   [head 0, L tokens]                 KV head 1   [head 2, L tokens]
                    [head 1, L tokens] @ keys.T                    [head 3, L tokens] @ keys.T

    Args:
        q: `[B, L, H, D]`.
        k, v: `[B, K, S, D]`, of `S` tokens that may be seen; `K` divides `H`.
        visible: `[B or 1, L or 1, S]` bool, which query sees which; None: each sees all. A query that sees nothing
            gives zeros.
        scale: multiplies the scores.
        dropout: the share of attention weights that is dropped.

    Returns:
        `[B, L, H, D]`.
    """
    batch, length, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    group_size = num_heads // num_kv_heads
    rows = q.reshape(batch, length, num_kv_heads, group_size, head_dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
    mask, blind = None, None
    if visible is not None:
        # A query that sees nothing looks at everything, and what comes of it is dropped: its gradients stay numbers.
        blind = ~visible.any(-1)
        mask = (visible | blind.unsqueeze(-1)).expand(-1, length, -1).repeat(1, group_size, 1).unsqueeze(1)
    mixed = scaled_dot_product_attention(rows, k, v, attn_mask=mask, dropout_p=dropout, scale=scale)
    mixed = mixed.view(batch, num_kv_heads, group_size, length, head_dim).permute(0, 3, 1, 2, 4).reshape(q.shape)
    return mixed if blind is None else mixed.masked_fill(blind[:, :, None, None], 0)
