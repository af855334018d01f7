"""What the decoders of all families share: the table of token vectors, the output product and the model's interface."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import nn

from kvist.attention import inverse_frequencies, rope_tables
from kvist.config import ModelConfig, RopeConfig
from kvist.kernels.plain_linear import Linear
from kvist.models.layers import RMSNorm
from kvist.models.matrices import TokenEmbedding
from kvist.models.step_inputs import StepInputs


class Decoder(nn.Module, ABC):
    """A decoder-only language model. A family adds its layers, `hidden_states` and `rope_of`.

    Parameters are named as in Hugging Face checkpoints, less the leading `model.`; the output matrix of a model with
    tied embeddings is the embedding itself.
    """

    norm: RMSNorm
    """After the last layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = TokenEmbedding(config.vocab_size, config.embed_dim)
        self._frequencies: dict[tuple[RopeConfig, torch.device], torch.Tensor] = {}
        self.lm_head = None if config.tie_embeddings else Linear(config.embed_dim, config.vocab_size, bias=False)

    @property
    def dtype(self) -> torch.dtype:
        """What hidden states are computed in."""
        return self.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """Logits `[S, V]`, float32, of the rows that the step asks for. Writes the step's keys and values."""
        hidden = self.hidden_states(inputs)
        # Rows are asked for once and in their order: as many as there are is all of them.
        return self.logits(hidden if len(inputs.logit_rows) == len(hidden) else hidden[inputs.logit_rows])

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """What the first layer takes, `[..., E]`, for token ids `[...]`."""
        x: torch.Tensor = self.embed_tokens(token_ids)
        return x

    @abstractmethod
    def hidden_states(self, inputs: StepInputs, *, plain_layers: bool = False) -> torch.Tensor:
        """The normed output of the last layer for every token of the step, `[T, E]`.

        Args:
            inputs: the step.
            plain_layers: run no layer natively: as modules, whose hooks see what passes.
        """

    @abstractmethod
    def rope_of(self, layer: int) -> RopeConfig:
        """How a layer turns its queries and keys by their positions."""

    def rope_tables(
        self, rope: RopeConfig, positions: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine of each token's angles, as `kvist.attention.rope_tables` gives them."""
        key = rope, positions.device
        if key not in self._frequencies:
            self._frequencies[key] = inverse_frequencies(rope, self.config.head_dim, positions.device)
        return rope_tables(self._frequencies[key], positions, dtype)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[S, V]` float32 from hidden states `[S, E]`."""
        logits: torch.Tensor = self.embed_tokens.product(hidden) if self.lm_head is None else self.lm_head(hidden)
        return logits.float()
