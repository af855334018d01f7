"""Mistral (arXiv 2310.06825): Llama with a sliding window over all layers in its first version, none later."""

from __future__ import annotations

from collections.abc import Mapping

from kvist.models.config_fields import ConfigFields, shape_fields
from kvist.models.llama import LlamaConfig


def config(raw: Mapping[str, object]) -> LlamaConfig:
    """From a Hugging Face `config.json`."""
    fields = ConfigFields(raw)
    fields.require("hidden_act", "silu", default="silu")
    num_layers = fields.num_layers()
    # Absent means the first version's window; later versions write null.
    window = fields.optional_integer("sliding_window") if "sliding_window" in raw else 4096
    return LlamaConfig(
        **shape_fields(fields),
        model_type="mistral",
        max_context=fields.integer("max_position_embeddings", 4096 * 32),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        windows=(window,) * num_layers,
        rope=fields.one_rope(),
    )
