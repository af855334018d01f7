"""Tiny random models of every family, as transformers builds them, and the same weights in Kvist's decoder."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kvist.cache.kv_cache import KVCache, Span
from kvist.config import CacheConfig
from kvist.kv_format import LayerFormats
from kvist.models.decoder import Decoder
from kvist.models.registry import build_decoder, decoder_config
from kvist.models.step_inputs import StepInputs

_SHAPE = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

# name -> (model_type, what differs from _SHAPE)
TINY_CONFIGS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {}),
    "llama_mha_tied": ("llama", {"num_key_value_heads": 6, "tie_word_embeddings": True}),
    "llama_mqa_biased": ("llama", {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
    "llama_wide_heads": ("llama", {"head_dim": 20}),
    "llama_linear_rope": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_theta": 5e5}),
    "llama_llama3_rope": ("llama", {"rope_parameters": _LLAMA3}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral_windowed": ("mistral", {"sliding_window": 7}),
    "qwen2": ("qwen2", {}),
    "qwen2_windowed": ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3_tied_biased": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True}),
    "gemma3": ("gemma3_text", {"head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 16}),
    "gemma3_capped": (
        "gemma3_text",
        {
            "head_dim": 16,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 24,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3_scaled": (
        "gemma3_text",
        {
            "head_dim": 16,
            "num_hidden_layers": 7,
            "sliding_window": 7,
            "num_key_value_heads": 1,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
}


@dataclass(frozen=True)
class TinyModel:
    """The oracle and ours, with the same weights."""

    oracle: PreTrainedModel
    decoder: Decoder
    raw_config: dict[str, object]


def tiny_oracle(family: str, directory: Path | None = None, **others: object) -> PreTrainedModel:
    """A random transformers model in float32, other fields as given; saved to `directory` where there is one."""
    model_type, changes = TINY_CONFIGS[family]
    config = AutoConfig.for_model(model_type, **{**_SHAPE, **changes, **others})
    torch.manual_seed(0)
    oracle = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            around = 1.0 if name.endswith("norm.weight") and model_type != "gemma3_text" else 0.0
            parameter.copy_(around + torch.randn_like(parameter) * 0.2)
    if directory is not None:
        oracle.save_pretrained(directory)
    return oracle


def tiny_model(family: str, directory: Path) -> TinyModel:
    """Both models; ours is configured from the `config.json` that transformers wrote."""
    oracle = tiny_oracle(family, directory)
    raw = json.loads((directory / "config.json").read_text())
    decoder = build_decoder(decoder_config(raw)).eval().requires_grad_(False)
    state = {key.removeprefix("model."): value for key, value in oracle.state_dict().items()}
    if decoder.lm_head is None:
        state.pop("lm_head.weight", None)
    decoder.load_state_dict(state, strict=True)
    return TinyModel(oracle, decoder, raw)


def new_cache(decoder: Decoder, kv_format: str = "fp32", memory_bytes: int = 2**30) -> KVCache:
    return KVCache(decoder.config.layers, CacheConfig(LayerFormats.parse(kv_format), memory_bytes))


def run_step(
    decoder: Callable[[StepInputs], torch.Tensor],
    cache: KVCache,
    tokens: dict[int, list[int]],
    *,
    every_row: bool = True,
) -> dict[int, torch.Tensor]:
    """One step over new tokens by sequence id; logits of all of them, or of each sequence's last."""
    spans = [Span(sequence_id, len(ids)) for sequence_id, ids in tokens.items()]
    for span in spans:
        assert cache.reserve(span.sequence_id, cache.length(span.sequence_id) + span.num_tokens)
    view = cache.view(spans)
    packed = torch.tensor([token for ids in tokens.values() for token in ids])
    stops = torch.tensor([span.num_tokens for span in spans]).cumsum(0)
    rows = torch.arange(len(packed)) if every_row else stops - 1
    with torch.inference_mode():
        logits = decoder(StepInputs(packed, view.positions(), rows, view))
    cache.commit(view)
    counts = [span.num_tokens for span in spans] if every_row else [1] * len(spans)
    return dict(zip(tokens, logits.split(counts), strict=True))
