"""Gemma 3 (arXiv 2503.19786), the text part: windows in five layers of six, two rope bases, norms around each block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from kvist.attention import GatedMLP, StepAttention
from kvist.cache.cache_view import CacheView
from kvist.config import ModelConfig, RopeConfig
from kvist.errors import UnsupportedModelError
from kvist.models.config_fields import ConfigFields, shape_fields
from kvist.models.decoder import Decoder
from kvist.models.layers import DecoderLayer, LayerParts, OffsetRMSNorm
from kvist.models.native_layer import LayerSteps
from kvist.models.step_inputs import StepInputs

# What transformers assumes where a configuration leaves a field out; the published multimodal ones do.
_DEFAULTS = {
    "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "sliding_window": 4096,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(ModelConfig):
    """Gemma's switches. Layers with a window use `local_rope`, the others `global_rope`."""

    global_rope: RopeConfig
    local_rope: RopeConfig
    query_scale: float
    attention_bias: bool
    logit_softcap: float | None


def config(raw: Mapping[str, object]) -> Gemma3Config:
    """From a Hugging Face `config.json`, of the text model or of the multimodal one around it."""
    outer = ConfigFields(raw)
    text = outer.section("text_config")
    fields = outer if text is None else ConfigFields({**text, **_tied(raw)})
    fields = ConfigFields({**_DEFAULTS, **{name: value for name, value in fields.raw.items() if value is not None}})
    fields.require("hidden_activation", "gelu_pytorch_tanh", default="gelu_pytorch_tanh")
    if fields.flag("use_bidirectional_attention", False):
        raise UnsupportedModelError("Gemma 3 with bidirectional attention is an encoder: it cannot generate text")
    if fields.optional_number("attn_logit_softcapping") is not None:
        # Gemma 2's; transformers reads the field for Gemma 3, but computes without it.
        raise UnsupportedModelError("attn_logit_softcapping is not supported for Gemma 3")
    num_layers = fields.num_layers()
    pattern = fields.integer("sliding_window_pattern", 6)
    types = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(num_layers)]
    ropes = fields.section("rope_parameters") or {}
    global_rope, local_rope = (ConfigFields(ropes).section(kind) for kind in ("full_attention", "sliding_attention"))
    return Gemma3Config(
        **shape_fields(fields, head_dim=256),
        model_type="gemma3",
        max_context=fields.integer("max_position_embeddings", 131_072),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        tie_embeddings=fields.flag("tie_word_embeddings", True),
        windows=fields.layer_windows(num_layers, fields.integer("sliding_window"), types),
        global_rope=fields.rope(global_rope or fields.section("rope_scaling"), fields.number("rope_theta", 1e6)),
        local_rope=fields.rope(local_rope, fields.number("rope_local_base_freq", 1e4)),
        query_scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        attention_bias=fields.flag("attention_bias", False),
        logit_softcap=fields.optional_number("final_logit_softcapping"),
    )


def _tied(raw: Mapping[str, object]) -> Mapping[str, object]:
    return {"tie_word_embeddings": raw["tie_word_embeddings"]} if "tie_word_embeddings" in raw else {}


class Gemma3Decoder(Decoder):
    """Gemma 3's text decoder."""

    def __init__(self, config: Gemma3Config) -> None:
        super().__init__(config)
        self.gemma = config
        self.layers = nn.ModuleList(Gemma3Layer(config, window) for window in config.windows)
        self.norm = OffsetRMSNorm(config.embed_dim, config.rms_norm_eps)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        x = super().embed(token_ids)
        # The factor is rounded to the weights' dtype first, as in training.
        return x * torch.tensor(self.gemma.embed_dim**0.5, dtype=x.dtype, device=x.device)

    def hidden_states(self, inputs: StepInputs, *, plain_layers: bool = False) -> torch.Tensor:
        config = self.gemma
        x = self.embed(inputs.token_ids)
        tables = {
            rope: self.rope_tables(rope, inputs.positions, x.dtype) for rope in (config.global_rope, config.local_rope)
        }
        steps = LayerSteps(inputs.cache, plain=plain_layers)
        x = steps.run(self.layers, x, [tables[self.rope_of(index)] for index in range(len(self.layers))])
        return steps.norm(self.norm, x)

    def rope_of(self, layer: int) -> RopeConfig:
        return self.gemma.global_rope if self.gemma.windows[layer] is None else self.gemma.local_rope

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = super().logits(hidden)
        softcap = self.gemma.logit_softcap
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)


class Gemma3Layer(DecoderLayer):
    """A decoder layer with a norm before and after both attention and MLP."""

    def __init__(self, config: Gemma3Config, window: int | None) -> None:
        super().__init__()
        norm = partial(OffsetRMSNorm, eps=config.rms_norm_eps)
        self.input_layernorm = norm(config.embed_dim)
        self.self_attn = StepAttention(
            embed_dim=config.embed_dim,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.query_scale,
            qkv_bias=config.attention_bias,
            output_bias=config.attention_bias,
            window=window,
            q_norm=norm(config.head_dim),
            k_norm=norm(config.head_dim),
        )
        self.post_attention_layernorm = norm(config.embed_dim)
        self.pre_feedforward_layernorm = norm(config.embed_dim)
        self.mlp = GatedMLP(config.embed_dim, config.mlp_dim, "gelu_tanh")
        self.post_feedforward_layernorm = norm(config.embed_dim)

    def forward(
        self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], cache: CacheView, layer: int
    ) -> torch.Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), rope, cache, layer))
        y: torch.Tensor = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return y

    def parts(self) -> LayerParts:
        return LayerParts(
            attention=self.self_attn,
            attention_input_norm=self.input_layernorm,
            attention_output_norm=self.post_attention_layernorm,
            mlp=self.mlp,
            mlp_input_norm=self.pre_feedforward_layernorm,
            mlp_output_norm=self.post_feedforward_layernorm,
        )
