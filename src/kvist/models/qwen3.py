"""Qwen3 (arXiv 2505.09388): Llama with norms over the head dim of queries and keys."""

from __future__ import annotations

from collections.abc import Mapping

from kvist.models.config_fields import ConfigFields
from kvist.models.llama import LlamaConfig, llama_fields
from kvist.models.qwen2 import windows


def config(raw: Mapping[str, object]) -> LlamaConfig:
    """From a Hugging Face `config.json`."""
    fields = ConfigFields(raw)
    attention_bias = fields.flag("attention_bias", False)
    return LlamaConfig(
        **llama_fields(fields, max_context=32768, head_dim=128),
        model_type="qwen3",
        windows=windows(fields),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm=True,
    )
