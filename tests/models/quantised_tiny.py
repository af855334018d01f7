"""Tiny random models of every family with weights that are quantised or in bf16, whose layers can run natively."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle

import torch
from torch import nn

from kvist.cache.kv_cache import KVCache
from kvist.config import CacheConfig
from kvist.kernels.key_statics import KeyStatics
from kvist.kernels.weight_codec import pack, quantise
from kvist.kv_format import LayerFormats
from kvist.loading.key_calibration import calibrate
from kvist.loading.progress import no_progress
from kvist.models.decoder import Decoder
from kvist.models.layers import OffsetRMSNorm, RMSNorm
from kvist.models.matrices import NativeMatrix, TokenEmbedding, has_fine_rows, quantised_module, wide_module
from kvist.models.native_layer import use_native_layers
from kvist.models.registry import build_decoder, decoder_config

VOCAB_SIZE = 199
# A token whose vector is no number.
NAN_TOKEN = 7

_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
# name -> (model_type, what differs from _SHAPE)
QUANTISED_CONFIGS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {"head_dim": 32}),
    "llama_mqa_biased": ("llama", {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
    "llama_narrow_heads": ("llama", {"head_dim": 24, "num_attention_heads": 8, "num_key_value_heads": 8}),
    "mistral_windowed": ("mistral", {"sliding_window": 7}),
    "qwen2": ("qwen2", {"head_dim": 32}),
    "qwen3": ("qwen3", {"head_dim": 32, "attention_bias": True}),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 64,
            "num_key_value_heads": 1,
            "sliding_window": 70,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 64,
        },
    ),
}


def quantised_decoder(family: str, formats: Sequence[str] = ("int4_min", "int8")) -> Decoder:
    """A model whose matrices have these formats, taken in turn, so that q, k and v differ.

    The table of token vectors is int8, or bf16 where that is the only format.
    """
    model_type, changes = QUANTISED_CONFIGS[family]
    decoder = build_decoder(decoder_config({"model_type": model_type, **_SHAPE, **changes})).eval()
    decoder.requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in decoder.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.1 if parameter.dim() == 2 else 0.2))
    for module in decoder.modules():
        if isinstance(module, RMSNorm) and not isinstance(module, OffsetRMSNorm):
            module.weight += 1
    decoder.embed_tokens.weight *= 10
    decoder.embed_tokens.weight[NAN_TOKEN] = float("nan")
    taken = cycle(formats)
    for name, module in list(decoder.named_modules()):
        if isinstance(module, nn.Linear | TokenEmbedding):
            is_table = isinstance(module, TokenEmbedding) and set(formats) != {"bf16"}
            format = "int8" if is_table else next(taken)
            if format == "bf16":
                module.weight = nn.Parameter(module.weight.bfloat16(), requires_grad=False)
                decoder.set_submodule(name, wide_module(module))
                continue
            weight = replace(pack(quantise(module.weight, format)), fine_rows=has_fine_rows(name))
            decoder.set_submodule(name, quantised_module(module, weight))
    assert all(isinstance(module, NativeMatrix) for module in decoder.modules() if hasattr(module, "product"))
    use_native_layers(decoder)
    return decoder


def statics_of_decoder(decoder: Decoder) -> tuple[KeyStatics, ...]:
    return calibrate(decoder, tokens(100, seed=9), no_progress)


def cache_of(decoder: Decoder, kv_format: str, statics: Sequence[KeyStatics] | None = None) -> KVCache:
    formats = LayerFormats.parse(kv_format)
    if formats.quantised_keys and statics is None:
        statics = statics_of_decoder(decoder)
    config = CacheConfig(formats, 1 << 26, rewind_slack_tokens=0)
    return KVCache(decoder.config.layers, config, key_statics=statics if formats.quantised_keys else None)


def tokens(count: int, seed: int) -> list[int]:
    """Random tokens, none of which is `NAN_TOKEN`."""
    return torch.randint(NAN_TOKEN + 1, VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
