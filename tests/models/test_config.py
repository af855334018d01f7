"""Configurations as people have them are read; what is wrong or unsupported is refused in one line."""

from __future__ import annotations

import pytest

from kvist.config import LinearRopeScaling, Llama3RopeScaling, RopeConfig
from kvist.errors import KvistError, ModelFileError, UnsupportedModelError
from kvist.models.gemma3 import Gemma3Config
from kvist.models.llama import LlamaConfig
from kvist.models.registry import decoder_config

LLAMA = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def llama(**changes: object) -> LlamaConfig:
    config = decoder_config({**LLAMA, **changes})
    assert isinstance(config, LlamaConfig)
    return config


def test_sizes_and_defaults() -> None:
    config = llama(num_key_value_heads=None)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 4, 16)
    assert config.max_context == 2048
    assert config.rope == RopeConfig(10_000.0)
    assert llama(head_dim=24).head_dim == 24


def test_rope_in_old_and_new_fields() -> None:
    old = llama(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2})
    new = llama(rope_parameters={"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0})
    assert old.rope == new.rope == RopeConfig(5e5, LinearRopeScaling(2.0))
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaled = llama(rope_theta=5e5, rope_scaling={**llama3, "original_max_position_embeddings": 8192})
    assert scaled.rope == RopeConfig(5e5, Llama3RopeScaling(8.0, 1.0, 4.0, 8192))


@pytest.mark.parametrize("kind", ["yarn", "dynamic", "longrope", "su", "mrope"])
def test_other_rope_types_are_refused_by_name(kind: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"'{kind}'"):
        llama(rope_scaling={"type": kind, "factor": 2.0})


def test_windows_of_each_family() -> None:
    shape = {name: value for name, value in LLAMA.items() if name != "model_type"}
    mistral = {**shape, "model_type": "mistral"}
    assert decoder_config(mistral).windows == (4096, 4096)
    assert decoder_config({**mistral, "sliding_window": None}).windows == (None, None)
    qwen = {**shape, "model_type": "qwen2", "sliding_window": 9, "max_window_layers": 1}
    assert decoder_config(qwen).windows == (None, None)
    assert decoder_config({**qwen, "use_sliding_window": True}).windows == (None, 9)
    gemma = {**shape, "model_type": "gemma3_text", "num_hidden_layers": 7, "sliding_window": 9}
    assert decoder_config(gemma).windows == (9, 9, 9, 9, 9, None, 9)
    assert decoder_config({**gemma, "sliding_window_pattern": 2}).windows == (9, None, 9, None, 9, None, 9)


@pytest.mark.parametrize(
    ("model_type", "max_context"), [("llama", 2048), ("mistral", 131_072), ("qwen2", 32_768), ("qwen3", 32_768)]
)
def test_the_llama_like_families_read_the_same_fields_the_same_way(model_type: str, max_context: int) -> None:
    default = llama(model_type=model_type)
    assert (default.model_type, default.max_context, default.rms_norm_eps) == (model_type, max_context, 1e-6)
    assert (default.tie_embeddings, default.rope) == (False, RopeConfig(10_000.0))
    given = llama(model_type=model_type, rms_norm_eps=1e-5, tie_word_embeddings=True, rope_theta=5e5)
    assert (given.rms_norm_eps, given.tie_embeddings, given.rope) == (1e-5, True, RopeConfig(5e5))
    with pytest.raises(UnsupportedModelError, match="hidden_act is 'relu'"):
        llama(model_type=model_type, hidden_act="relu")


def test_the_text_part_of_a_multimodal_gemma() -> None:
    """As published: a text_config with little more than sizes, the rest left to defaults."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = decoder_config({"model_type": "gemma3", "text_config": text, "vision_config": {}})
    assert isinstance(config, Gemma3Config)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262_208)
    assert config.global_rope == RopeConfig(1e6, LinearRopeScaling(8.0))
    assert config.local_rope == RopeConfig(1e4)
    assert config.tie_embeddings
    assert config.query_scale == 256**-0.5
    assert config.windows.count(None) == 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama4"}, "architecture 'llama4' is not supported: did you mean 'llama'"),
        ({"model_type": None}, "no model_type"),
        ({"vocab_size": None}, "no vocab_size"),
        ({"hidden_size": -64}, "hidden_size is -64"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3 KV heads"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000"),
        ({"rope_theta": 10**400}, "rope_theta is 1000"),
        ({"rope_scaling": {"type": "linear", "factor": 10**400}}, "factor is 1000"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
        ({"rope_scaling": {"type": "linear"}}, "no factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0"),
        ({"partial_rotary_factor": 0.5}, "partial rope"),
        ({"attention_bias": "yes"}, "attention_bias is 'yes'"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "layer_types must list 2"),
        ({"model_type": "qwen2", "layer_types": ["full_attention", "linear_attention"]}, "'linear_attention'"),
        ({"model_type": "qwen2", "layer_types": ["full_attention", "sliding_attention"]}, "sliding_window is missing"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "encoder"),
    ],
)
def test_bad_configurations_are_refused_in_one_line(changes: dict[str, object], message: str) -> None:
    with pytest.raises((ModelFileError, UnsupportedModelError)) as error:
        llama(**changes)
    assert isinstance(error.value, KvistError)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
