"""Qwen2 and Qwen2.5 (arXiv 2407.10671): Llama with biases on the projections to queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping

from kvist.models.config_fields import ConfigFields
from kvist.models.llama import LlamaConfig, llama_fields


def config(raw: Mapping[str, object]) -> LlamaConfig:
    """From a Hugging Face `config.json`."""
    fields = ConfigFields(raw)
    return LlamaConfig(
        **llama_fields(fields, max_context=32768),
        model_type="qwen2",
        windows=windows(fields),
        qkv_bias=True,
    )


def windows(fields: ConfigFields) -> tuple[int | None, ...]:
    """Qwen's windows: off unless `use_sliding_window`, and then from layer `max_window_layers` on."""
    num_layers = fields.num_layers()
    window = fields.integer("sliding_window", 4096) if fields.flag("use_sliding_window", False) else None
    first = num_layers if window is None else fields.integer("max_window_layers", 28, least=0)
    types = ["full_attention" if index < first else "sliding_attention" for index in range(num_layers)]
    return fields.layer_windows(num_layers, window, types)
