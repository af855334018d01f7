"""Queries and keys like those of a text, and the statics that follow from them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvist.config import LayerConfig
from kvist.kernels.codec import storage_formats
from kvist.kernels.key_statics import KeyMoments, KeyStatics, key_moments, key_statics
from kvist.loading.key_calibration import feedback_dims


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def frequencies(head_dim: int, theta: float = 10_000.0) -> torch.Tensor:
    return theta ** -(torch.arange(0, head_dim, 2) / head_dim)


def turned(x: torch.Tensor, position: float, frequencies: torch.Tensor) -> torch.Tensor:
    """Vectors `[..., D]` turned by rope to a position, in float64: a plane is a complex number."""
    planes = torch.complex(*x.double().chunk(2, dim=-1)) * torch.polar(
        torch.ones_like(frequencies, dtype=torch.float64), frequencies.double() * position
    )
    return torch.cat((planes.real, planes.imag), dim=-1)


def text_like(head_dim: int, num_kv_heads: int = 2, num_tokens: int = 300) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries `[T, 2K, D]` and keys `[T, K, D]` with what real ones have: means before rope, a few large dims, a first
    token like no other."""
    rates = frequencies(head_dim)
    spread = random(1, num_kv_heads, head_dim, seed=1).exp()
    k = random(num_tokens, num_kv_heads, head_dim, seed=2) * spread + 3 * random(1, num_kv_heads, head_dim, seed=3)
    k[0] *= 4
    mixing = random(2 * num_kv_heads, head_dim, head_dim, seed=4) * torch.linspace(0.05, 1, head_dim).unsqueeze(1) ** 9
    q = torch.einsum("thd,hde->the", random(num_tokens, 2 * num_kv_heads, head_dim, seed=5), mixing)
    at_positions = [
        torch.stack([turned(x[position], position, rates) for position in range(num_tokens)]).float() for x in (q, k)
    ]
    return at_positions[0], at_positions[1]


def received(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """What each key gets of the causal attention, `[K, T]`."""
    num_tokens, num_kv_heads, head_dim = k.shape
    queries = q.view(num_tokens, num_kv_heads, -1, head_dim)
    scores = torch.einsum("tkgd,skd->kgts", queries, k) * head_dim**-0.5
    hidden = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, float("-inf")).softmax(-1).sum((1, 2))


def moments_of(q: torch.Tensor, k: torch.Tensor, rates: torch.Tensor | None = None) -> KeyMoments:
    return key_moments(q, k, received(q, k), frequencies(k.shape[-1]) if rates is None else rates)


def statics_of(head_dim: int, num_kv_heads: int = 2) -> KeyStatics:
    moments = moments_of(*text_like(head_dim, num_kv_heads))
    return key_statics(moments, frequencies(head_dim), storage_formats()["int4"].group_dims(head_dim))


def identity_statics(layers: Sequence[LayerConfig]) -> list[KeyStatics]:
    """Statics with which keys are coded as they are."""
    return [_identity(layer.head_dim, layer.num_kv_heads) for layer in layers]


def _identity(head_dim: int, num_kv_heads: int) -> KeyStatics:
    block = feedback_dims(head_dim)
    return KeyStatics(
        offset=torch.zeros(num_kv_heads, head_dim),
        scale=torch.ones(num_kv_heads, head_dim),
        feedback=torch.eye(block).expand(num_kv_heads, head_dim // block, block, block),
        frequencies=torch.zeros(head_dim // 2),
    )
