"""Llama (arXiv 2302.13971, 2407.21783): pre-norm layers, grouped-query attention, gated MLP with SiLU.

Mistral, Qwen2 and Qwen3 differ from it by switches and build on the same decoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from kvist.attention import GatedMLP, StepAttention
from kvist.config import ModelConfig, RopeConfig
from kvist.models.config_fields import ConfigFields, ShapeFields, shape_fields
from kvist.models.decoder import Decoder
from kvist.models.layers import PreNormLayer, RMSNorm
from kvist.models.native_layer import LayerSteps
from kvist.models.step_inputs import StepInputs


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(ModelConfig):
    """The switches of the Llama-like families."""

    rope: RopeConfig
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


def config(raw: Mapping[str, object]) -> LlamaConfig:
    """From a Hugging Face `config.json`."""
    fields = ConfigFields(raw)
    attention_bias = fields.flag("attention_bias", False)
    return LlamaConfig(
        **llama_fields(fields, max_context=2048),
        model_type="llama",
        windows=(None,) * fields.num_layers(),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )


class LlamaFields(ShapeFields):
    """What the Llama-like families read from the same fields, as arguments of `LlamaConfig`."""

    max_context: int
    rms_norm_eps: float
    tie_embeddings: bool
    rope: RopeConfig


def llama_fields(fields: ConfigFields, *, max_context: int, head_dim: int | None = None) -> LlamaFields:
    """The fields that the Llama-like families share; `max_context` and `head_dim` are the family's defaults."""
    fields.require("hidden_act", "silu", default="silu")
    return {
        **shape_fields(fields, head_dim=head_dim),
        "max_context": fields.integer("max_position_embeddings", max_context),
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
        "tie_embeddings": fields.flag("tie_word_embeddings", False),
        "rope": fields.one_rope(),
    }


class LlamaDecoder(Decoder):
    """The decoder of the Llama-like families."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.rope = config.rope
        self.layers = nn.ModuleList(_layer(config, window) for window in config.windows)
        self.norm = RMSNorm(config.embed_dim, config.rms_norm_eps)

    def hidden_states(self, inputs: StepInputs, *, plain_layers: bool = False) -> torch.Tensor:
        x = self.embed(inputs.token_ids)
        rope = self.rope_tables(self.rope, inputs.positions, x.dtype)
        steps = LayerSteps(inputs.cache, plain=plain_layers)
        x = steps.run(self.layers, x, [rope] * len(self.layers))
        return steps.norm(self.norm, x)

    def rope_of(self, layer: int) -> RopeConfig:
        return self.rope


def _layer(config: LlamaConfig, window: int | None) -> PreNormLayer:
    attention = StepAttention(
        embed_dim=config.embed_dim,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5,
        qkv_bias=config.qkv_bias,
        output_bias=config.output_bias,
        window=window,
        q_norm=RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None,
        k_norm=RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None,
    )
    mlp = GatedMLP(config.embed_dim, config.mlp_dim, "silu", bias=config.mlp_bias)
    return PreNormLayer(config.embed_dim, config.rms_norm_eps, attention, mlp)
