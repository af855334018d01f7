"""Rotary position embedding: a query or key is turned by angles that grow with its position (arXiv 2104.09864).

The two halves of a head are the two coordinates of each rotated plane, as in Hugging Face checkpoints.
"""

from __future__ import annotations

import math

import torch

from kvist.config import LinearRopeScaling, Llama3RopeScaling, RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Radians per position of each plane, `[D / 2]` float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequencies: torch.Tensor = 1.0 / rope.theta**exponents
    match rope.scaling:
        case None:
            return frequencies
        case LinearRopeScaling(factor):
            return frequencies / factor
        case Llama3RopeScaling():
            return _llama3_frequencies(frequencies, rope.scaling)


def _llama3_frequencies(frequencies: torch.Tensor, scaling: Llama3RopeScaling) -> torch.Tensor:
    turns = scaling.original_max_context * frequencies / (2 * math.pi)
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = ramp.clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def rope_tables(
    frequencies: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of each token's angles, `[..., 1, D]` each, from positions `[...]`: `[T]`, or `[B, L]`.

    They are rounded to `dtype`, that of the queries and keys, as in Hugging Face models: any other rounding changes the
    likeliest token in bf16 at about one position in thirty.
    """
    angles = positions.to(torch.float32).unsqueeze(-1) * frequencies
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(-2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rope(x: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Turn queries or keys `[..., heads, D]` by their tokens' angles, in their dtype."""
    cos, sin = tables
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
