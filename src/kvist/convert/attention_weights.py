"""The projections of a layer's attention, head by head, whatever file they come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

_PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}


@dataclass(frozen=True)
class AttentionWeights:
    """The projections of a layer.

    A bias is the last column of its projection, which then takes the layer's input with a one after it: whatever is
    done to a head is done to its bias. The output's bias belongs to no head and is left out.

    Attributes:
        query: `[H, D, E]`, or `[H, D, E + 1]` with biases.
        key, value: the same with `K` heads.
        output: `[E, H, D]`.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor], head_dim: int) -> AttentionWeights:
        """From tensors by their names in a layer's attention: `q_proj.weight`, `q_proj.bias`, ..."""
        heads = {}
        for field, projection in _PROJECTIONS.items():
            matrix, bias = tensors[f"{projection}.weight"], tensors.get(f"{projection}.bias")
            if bias is not None:
                matrix = torch.cat((matrix, bias.unsqueeze(1)), dim=1)
            heads[field] = matrix.reshape(-1, head_dim, matrix.shape[1])
        output = tensors["o_proj.weight"]
        return cls(**heads, output=output.reshape(len(output), -1, head_dim))

    def tensors(self) -> dict[str, torch.Tensor]:
        """The other way, as views where that is possible."""
        embed_dim = len(self.output)
        found = {"o_proj.weight": self.output.flatten(1)}
        for field, projection in _PROJECTIONS.items():
            matrix: torch.Tensor = getattr(self, field).flatten(0, 1)
            found[f"{projection}.weight"] = matrix[:, :embed_dim]
            if matrix.shape[1] > embed_dim:
                found[f"{projection}.bias"] = matrix[:, embed_dim]
        return found

    @property
    def has_bias(self) -> bool:
        return self.query.shape[2] > len(self.output)

    @property
    def num_kv_heads(self) -> int:
        return len(self.key)

    @property
    def group_size(self) -> int:
        return len(self.query) // len(self.key)

    def with_ones(self, x: torch.Tensor) -> torch.Tensor:
        """What the projections take, `[..., E]` or `[..., E + 1]`, for the layer's inputs `[..., E]`."""
        return torch.cat((x, x.new_ones(*x.shape[:-1], 1)), dim=-1) if self.has_bias else x

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> AttentionWeights:
        """Each of the four tensors changed in the same way."""
        return AttentionWeights(*map(change, (self.query, self.key, self.value, self.output)))

    def regrouped(self, order: Sequence[int]) -> AttentionWeights:
        """The same function with its KV heads in another order, each with the query heads that read it."""
        size, kv_heads = self.group_size, torch.tensor(order)
        heads = torch.tensor([kv_head * size + reader for kv_head in order for reader in range(size)])
        return AttentionWeights(self.query[heads], self.key[kv_heads], self.value[kv_heads], self.output[:, heads])
