"""Plain PyTorch twins of the kernels: the oracle of the tests, and the path where no faster one fits."""

from __future__ import annotations

import torch


def visible(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Which keys each query sees: `[T, L]` bool.

    The queries are the last `T` of the `L` positions. Each sees itself and what came before, `window` tokens at most.
    """
    query = torch.arange(num_keys - num_queries, num_keys, device=device).unsqueeze(1)
    key = torch.arange(num_keys, device=device).unsqueeze(0)
    seen = key <= query
    return seen if window is None else seen & (key > query - window)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention of one sequence's newest tokens over all its tokens, scores and sums in float32.

    Query head `h` reads KV head `h // group_size`; the queries of a group share its keys without repeating them.

    Args:
        q: `[T, H, D]`, queries of the last `T` positions.
        k: `[K, L, D]`, keys of all positions, this step's included. `v` likewise.
        scale: multiplies the scores.
        window: tokens that a query sees, itself included; None sees all.

    Returns:
        `[T, H, D]` in the dtype of `q`.
    """
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads, num_keys, _ = k.shape
    grouped = q.float().view(num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = torch.einsum("tkgd,kld->kgtl", grouped, k.float()) * scale
    scores = scores.masked_fill(~visible(num_queries, num_keys, window, q.device), float("-inf"))
    mixed = torch.einsum("kgtl,kld->tkgd", scores.softmax(dim=-1), v.float())
    return mixed.reshape(num_queries, num_heads, head_dim).to(q.dtype)
