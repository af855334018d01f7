"""A small decoder over padded tensors, to read, to teach with and to train; `kvist.models` has those of checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from kvist.attention.decoder_layer import DecoderLayer
from kvist.attention.grouped_query import LayerCache, check_mask
from kvist.attention.paged_cache import PagedCache
from kvist.checks import check_integer
from kvist.config import RopeConfig
from kvist.errors import OptionError

_INITIAL_STD = 0.02
_ROPE = RopeConfig(10_000.0)


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """What a `Decoder` is. With pre-norm, SiLU and rope it is a Llama, and its parameters have Llama's names.

    Args:
        vocab_size: `V`.
        num_layers: how many.
        tie_embeddings: whether the table of token vectors is the output matrix too.
        embed_dim, num_heads, num_kv_heads, head_dim, bias, rope: as in `GroupedQueryAttention`.
        mlp_dim, pre_norm, activation, dropout, eps: as in `DecoderLayer`.
    """

    vocab_size: int
    embed_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int | None = None
    mlp_dim: int | None = None
    bias: bool = False
    pre_norm: bool = True
    activation: str = "silu"
    dropout: float = 0.0
    rope: RopeConfig | None = _ROPE
    eps: float = 1e-6
    tie_embeddings: bool = True

    def __post_init__(self) -> None:
        for name in ("vocab_size", "embed_dim", "num_layers"):
            check_integer(name, getattr(self, name), 1)


class Decoder(nn.Module):
    """Token ids to logits, with a cache per layer.

    Args:
        config: what it is made of. The weights are random.

    Raises:
        OptionError: as `DecoderLayer`.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.embed_dim)
        self.layers = nn.ModuleList(
            DecoderLayer(
                config.embed_dim,
                config.num_heads,
                config.num_kv_heads,
                config.head_dim,
                config.bias,
                mlp_dim=config.mlp_dim,
                pre_norm=config.pre_norm,
                activation=config.activation,
                dropout=config.dropout,
                rope=config.rope,
                eps=config.eps,
            )
            for _ in range(config.num_layers)
        )
        self.norm = nn.RMSNorm(config.embed_dim, config.eps) if config.pre_norm else None
        self.lm_head = None if config.tie_embeddings else nn.Linear(config.embed_dim, config.vocab_size, bias=False)
        self._initialise()

    def forward(
        self,
        token_ids: torch.Tensor,
        caches: Sequence[LayerCache] | None = None,
        positions: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, list[LayerCache]]:
        """Logits of every token, and the caches of all layers with these tokens.

        Args:
            token_ids: `[B, L]`.
            caches: of the tokens before, one a layer; None: there are none.
            positions, mask: as in `GroupedQueryAttention`.

        Returns:
            `[B, L, V]`, and the caches.
        """
        x, kept = self._hidden_states(token_ids, caches, positions, mask)
        return self._logits(x), kept

    @torch.no_grad()
    def generate(
        self,
        token_ids: torch.Tensor,
        new_tokens: int,
        *,
        use_cache: bool = True,
        mask: torch.Tensor | None = None,
        caches: Sequence[LayerCache] | None = None,
    ) -> torch.Tensor:
        """Go on from a prompt, always with the likeliest token, without dropout.

        With a cache the prompt is computed at once (prefill), then each step computes one token. Without, each step
        computes everything from the beginning, for the same tokens.

        Args:
            token_ids: `[B, L]`, the prompts.
            new_tokens: how many follow.
            use_cache: whether keys and values are kept.
            mask: `[B, L]` bool, which of the prompts are tokens and not padding, on whichever side; None: all.
            caches: to begin from: `paged_caches`, or those that earlier tokens left; None begins with none.

        Returns:
            `[B, L + new_tokens]`, the prompts and what follows them.

        Raises:
            OptionError: there are caches that are not to be used, the prompts have no tokens, or the mask is not of
                their shape.
        """
        check_integer("new_tokens", new_tokens, 0)
        if caches is not None and not use_cache:
            raise OptionError("there are caches, and use_cache is False: leave out one of the two")
        if token_ids.dim() != 2 or not token_ids.shape[1]:
            raise OptionError(f"token_ids are {tuple(token_ids.shape)}: they must be [B, L] with one token at least")
        if mask is not None:
            check_mask(mask, token_ids.shape)
        was_training = [(module, module.training) for module in self.modules()]
        self.eval()
        try:
            text, real, step, step_real = token_ids, mask, token_ids, mask
            for _ in range(new_tokens):
                x, kept = self._hidden_states(step, caches, None, step_real)
                token = self._logits(_last(x, step_real)).argmax(-1, keepdim=True)
                text = torch.cat((text, token), dim=1)
                if use_cache:
                    caches, step, step_real = kept, token, None
                else:
                    real = None if real is None else torch.cat((real, torch.ones_like(token, dtype=torch.bool)), dim=1)
                    step, step_real = text, real
            return text
        finally:
            for module, training in was_training:  # each its own: some may be frozen
                module.training = training

    def paged_caches(self, batch: int, max_tokens: int, kv_format: str = "fp32") -> list[LayerCache]:
        """Empty caches in pages, one a layer; the arguments are those of `PagedCache`."""
        return [
            PagedCache(
                batch,
                self.config.num_kv_heads,
                cast(DecoderLayer, layer).self_attn.head_dim,
                max_tokens=max_tokens,
                kv_format=kv_format,
                device=self.embed_tokens.weight.device,
            )
            for layer in self.layers
        ]

    def _hidden_states(
        self,
        token_ids: torch.Tensor,
        caches: Sequence[LayerCache] | None,
        positions: torch.Tensor | None,
        mask: torch.Tensor | None,
    ) -> tuple[torch.Tensor, list[LayerCache]]:
        if caches is not None and len(caches) != len(self.layers):
            raise OptionError(f"there are {len(caches)} caches for {len(self.layers)} layers: give one for each")
        x, kept = self.embed_tokens(token_ids), []
        for index, layer in enumerate(self.layers):
            x, cache = layer(x, None if caches is None else caches[index], positions, mask)
            kept.append(cache)
        return x if self.norm is None else self.norm(x), kept

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        matrix = self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        return nn.functional.linear(x, matrix)

    def _initialise(self) -> None:
        """Small random weights; those that add to the stream are smaller where there are more layers, as in GPT-2."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue  # norms begin at 1; biases as PyTorch has them
            adds = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(parameter, std=_INITIAL_STD / (2 * len(self.layers)) ** 0.5 if adds else _INITIAL_STD)


def _last(x: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
    """The hidden states `[B, E]` of each row's last token, wherever its padding stands."""
    if real is None:
        return x[:, -1]
    places = torch.arange(x.shape[1], device=x.device).expand_as(real).masked_fill(~real, 0).amax(1)
    return x[torch.arange(len(x), device=x.device), places]
