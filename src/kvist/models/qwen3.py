"""Qwen3 (arXiv 2505.09388): Llama with norms over the head dim of queries and keys."""

from __future__ import annotations

from collections.abc import Mapping

from kvist.models.config_fields import ConfigFields, shape_fields
from kvist.models.llama import LlamaConfig
from kvist.models.qwen2 import windows


def config(raw: Mapping[str, object]) -> LlamaConfig:
    """From a Hugging Face `config.json`."""
    fields = ConfigFields(raw)
    fields.require("hidden_act", "silu", default="silu")
    attention_bias = fields.flag("attention_bias", False)
    return LlamaConfig(
        **shape_fields(fields, head_dim=128),
        model_type="qwen3",
        max_context=fields.integer("max_position_embeddings", 32768),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        windows=windows(fields),
        rope=fields.one_rope(),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm=True,
    )
