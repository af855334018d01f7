"""Rope turns by position; the tables of transformers are compared through the models in tests/models."""

from __future__ import annotations

import torch

from kvist.attention import apply_rope, inverse_frequencies, rope_tables
from kvist.config import LinearRopeScaling, RopeConfig


def rotated(x: torch.Tensor, positions: list[int], rope: RopeConfig) -> torch.Tensor:
    return apply_rope(x, rope_tables(inverse_frequencies(rope, x.shape[-1]), torch.tensor(positions), x.dtype))


def test_scores_depend_on_the_distance_alone() -> None:
    q, k = torch.randn(1, 2, 16), torch.randn(1, 2, 16)
    rope = RopeConfig(10_000.0)
    near = (rotated(q, [9], rope) * rotated(k, [4], rope)).sum(-1)
    far = (rotated(q, [5009], rope) * rotated(k, [5004], rope)).sum(-1)
    other = (rotated(q, [9], rope) * rotated(k, [5], rope)).sum(-1)
    assert torch.allclose(near, far, atol=1e-3)
    assert not torch.allclose(near, other, atol=1e-1)


def test_position_zero_changes_nothing_and_lengths_stay() -> None:
    x = torch.randn(2, 3, 8)
    turned = rotated(x, [0, 77], RopeConfig(100.0))
    assert torch.equal(turned[0], x[0])
    assert torch.allclose(turned[1].norm(dim=-1), x[1].norm(dim=-1), atol=1e-5)


def test_linear_scaling_divides_positions() -> None:
    x = torch.randn(1, 1, 8)
    scaled = rotated(x, [12], RopeConfig(100.0, LinearRopeScaling(4.0)))
    assert torch.allclose(scaled, rotated(x, [3], RopeConfig(100.0)), atol=1e-6)
