"""Plain twins of the kernels: the oracle of the tests, and the path where no faster one fits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
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


def fed_back_codes(
    values: Sequence[np.float32], step: np.float32, floor: np.float32, feedback: Sequence[Sequence[np.float32]]
) -> list[int]:
    """The int4 codes of one group of one vector, rounded from its last dim to its first.

    What is lost in a dim, between its value and `floor + code * step`, moves the targets of the dims before it. Each
    operation rounds to float32 by itself.

    Args:
        values: of the group's dims.
        step, floor: of the group.
        feedback: by the dim that was rounded, then by the dim that it moves.
    """
    inverse = np.float32(1) / step if step > 0 else np.float32(0)
    targets, codes = list(values), [0] * len(values)
    for dim in reversed(range(len(values))):
        codes[dim] = int(min(max(np.rint((targets[dim] - floor) * inverse), 0), 15))
        error = floor + np.float32(codes[dim]) * step - values[dim]
        for moved in range(dim):
            targets[moved] -= feedback[dim][moved] * error
    return codes
