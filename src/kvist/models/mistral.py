"""Mistral (arXiv 2310.06825): Llama with a sliding window over all layers in its first version, none later."""

from __future__ import annotations

from collections.abc import Mapping

from kvist.models.config_fields import ConfigFields
from kvist.models.llama import LlamaConfig, llama_fields


def config(raw: Mapping[str, object]) -> LlamaConfig:
    """From a Hugging Face `config.json`."""
    fields = ConfigFields(raw)
    # Absent means the first version's window; later versions write null.
    window = fields.optional_integer("sliding_window") if "sliding_window" in raw else 4096
    return LlamaConfig(
        **llama_fields(fields, max_context=4096 * 32),
        model_type="mistral",
        windows=(window,) * fields.num_layers(),
    )
