"""A GGUF file's metadata becomes the configuration that its Hugging Face original has."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_files import hf_state, write_tiny_gguf
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvist.config import LinearRopeScaling, Llama3RopeScaling
from kvist.errors import KvistError, ModelFileError, UnsupportedModelError
from kvist.loading.gguf_config import hf_config
from kvist.loading.gguf_file import GgufFile
from kvist.models.gemma3 import Gemma3Config
from kvist.models.llama import LlamaConfig
from kvist.models.registry import decoder_config


def config_of(tmp_path: Path, architecture: str = "llama", state: Any = None, **options: Any) -> dict[str, Any]:
    return hf_config(GgufFile(write_tiny_gguf(tmp_path / "model.gguf", architecture, state, **options)))


@pytest.mark.parametrize(
    ("architecture", "model_type"),
    [("llama", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3"), ("gemma3", "gemma3_text")],
)
def test_the_sizes_are_those_of_the_file(architecture: str, model_type: str, tmp_path: Path) -> None:
    raw = config_of(tmp_path, architecture)
    assert raw["model_type"] == model_type
    config = decoder_config(raw)
    assert (config.vocab_size, config.embed_dim, config.mlp_dim, config.num_layers) == (300, 64, 96, 3)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.max_context) == (4, 2, 32, 512)
    assert config.rms_norm_eps == pytest.approx(1e-5)
    assert config.tie_embeddings
    rope = config.global_rope if isinstance(config, Gemma3Config) else config.rope
    assert (rope.theta, rope.scaling) == (50_000.0, None)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_transformers_understands_the_configuration_alike(architecture: str, tmp_path: Path) -> None:
    raw = config_of(tmp_path, architecture)
    theirs = AutoConfig.for_model(**raw)
    ours = decoder_config(theirs.to_dict())
    assert ours == decoder_config(raw)


def test_an_output_matrix_unties_the_embeddings(tmp_path: Path) -> None:
    assert not decoder_config(config_of(tmp_path, state=hf_state("llama", tied=False))).tie_embeddings


def test_biases_are_told_from_the_tensors(tmp_path: Path) -> None:
    assert config_of(tmp_path, state=hf_state("llama", biased=True))["attention_bias"] is True
    assert config_of(tmp_path)["attention_bias"] is False
    assert decoder_config(config_of(tmp_path, "qwen2")).qkv_bias


def test_the_head_dim_is_the_embedding_over_the_heads_unless_said(tmp_path: Path) -> None:
    state = hf_state("llama")
    raw = config_of(
        tmp_path, state=state, metadata={"llama.attention.key_length": None, "llama.attention.value_length": None}
    )
    assert raw["head_dim"] == 16


def test_a_window_makes_a_llama_file_a_mistral_model(tmp_path: Path) -> None:
    raw = config_of(tmp_path, metadata={"llama.attention.sliding_window": 128})
    assert decoder_config(raw).windows == (128,) * 3
    assert raw["model_type"] == "mistral"


# --- rope -------------------------------------------------------------------------------------------------------------


def test_linear_rope_scaling_is_kept(tmp_path: Path) -> None:
    metadata = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    config = decoder_config(config_of(tmp_path, metadata=metadata))
    assert isinstance(config, LlamaConfig)
    assert config.rope.scaling == LinearRopeScaling(4.0)
    for metadata in ({"llama.rope.scaling.type": "none"}, {"llama.rope.scaling.factor": 1.0}):
        assert config_of(tmp_path, metadata=metadata)["rope_scaling"] is None
    assert config_of(tmp_path, metadata={"llama.rope.scale_linear": 2.0})["rope_scaling"]["factor"] == 2.0


@pytest.mark.parametrize("kind", ["yarn", "longrope"])
def test_other_rope_scaling_is_kept_by_name_and_refused_by_the_decoder(kind: str, tmp_path: Path) -> None:
    raw = config_of(tmp_path, metadata={"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": 4.0})
    with pytest.raises(UnsupportedModelError, match=f"rope type '{kind}' is not supported"):
        decoder_config(raw)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_parameters_are_recovered_from_the_factors(factor: float, tmp_path: Path) -> None:
    """The factors come from transformers' own frequencies: stored is how much each one is divided by."""
    scaling = {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    shape = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 32, "max_position_embeddings": 131_072}
    plain, scaled = (
        ROPE_INIT_FUNCTIONS["llama3"](
            AutoConfig.for_model("llama", **shape, rope_parameters={**scaling, "rope_theta": 5e5, "factor": f}),
            torch.device("cpu"),
        )[0]
        for f in (1.0, factor)
    )
    factors = (plain / scaled).numpy()
    assert factors.max() == pytest.approx(factor)
    raw = config_of(tmp_path, metadata={"llama.rope.freq_base": 5e5}, extra_tensors={"rope_freqs.weight": factors})
    config = decoder_config(raw)
    assert isinstance(config, LlamaConfig)
    assert config.rope.theta == 5e5
    assert config.rope.scaling == Llama3RopeScaling(factor, 1.0, 4.0, 8192)


def test_unknown_rope_factors_are_refused_and_factors_of_one_change_nothing(tmp_path: Path) -> None:
    odd = {"rope_freqs.weight": np.linspace(1, 3, 16, dtype=np.float32)}
    with pytest.raises(UnsupportedModelError, match=r"neither Llama 3.1's nor Llama 3.2's"):
        config_of(tmp_path, extra_tensors=odd)
    ones = {"rope_freqs.weight": np.ones(16, np.float32)}
    assert config_of(tmp_path, extra_tensors=ones)["rope_scaling"] is None


# --- gemma3 -----------------------------------------------------------------------------------------------------------


def gemma(tmp_path: Path, num_layers: int = 3, **metadata: Any) -> Gemma3Config:
    metadata = {f"gemma3.{key.replace('__', '.')}": value for key, value in metadata.items()}
    metadata["gemma3.block_count"] = num_layers
    # A file has more tensors than layers, or it is refused.
    fill = {f"extra.{index}": np.zeros(1, np.float32) for index in range(num_layers)}
    config = decoder_config(config_of(tmp_path, "gemma3", metadata=metadata, extra_tensors=fill))
    assert isinstance(config, Gemma3Config)
    return config


def test_gemma3_has_five_windows_and_then_none(tmp_path: Path) -> None:
    config = gemma(tmp_path, 7, attention__sliding_window=24)
    assert config.windows == (24, 24, 24, 24, 24, None, 24)
    assert (config.global_rope.theta, config.local_rope.theta) == (50_000.0, 10_000.0)
    assert config.query_scale == pytest.approx(32**-0.5)
    assert config.logit_softcap is None


def test_gemma3_without_a_window_sees_everything_in_every_layer(tmp_path: Path) -> None:
    assert gemma(tmp_path, 7).windows == (None,) * 7


def test_gemma3_takes_the_pattern_and_the_local_base_from_files_that_say_them(tmp_path: Path) -> None:
    period = gemma(tmp_path, 4, attention__sliding_window=8, attention__sliding_window_pattern=2)
    assert period.windows == (8, None, 8, None)
    listed = gemma(tmp_path, 3, attention__sliding_window=8, attention__sliding_window_pattern=[True, False, False])
    assert listed.windows == (8, None, None)
    assert gemma(tmp_path, rope__freq_base_swa=20_000.0).local_rope.theta == 20_000.0


def test_gemma3_scales_the_rope_of_global_layers_alone(tmp_path: Path) -> None:
    config = gemma(tmp_path, rope__scaling__type="linear", rope__scaling__factor=8.0)
    assert config.global_rope.scaling == LinearRopeScaling(8.0)
    assert config.local_rope.scaling is None


def test_gemma3_27b_alone_scales_queries_by_the_model_dim_per_head(tmp_path: Path) -> None:
    assert gemma(tmp_path, 62).query_scale == pytest.approx(16**-0.5)
    assert gemma(tmp_path, 48).query_scale == pytest.approx(32**-0.5)


def test_gemma3_keeps_the_soft_cap_of_its_logits(tmp_path: Path) -> None:
    assert gemma(tmp_path, final_logit_softcapping=30.0).logit_softcap == 30.0


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metadata", "error", "reason"),
    [
        ({"general.architecture": "mamba2"}, UnsupportedModelError, r"'mamba2' is not supported: .*llama, qwen2"),
        ({"general.architecture": "qwen4"}, UnsupportedModelError, "did you mean 'qwen3'"),
        ({"llama.expert_count": 8}, UnsupportedModelError, "mixture of experts"),
        ({"llama.rope.dimension_count": 16}, UnsupportedModelError, "rope.dimension_count is 16, the head dim 32"),
        ({"llama.attention.value_length": 16}, UnsupportedModelError, "value_length is 16, the head dim 32"),
        ({"llama.attention.head_count_kv": [2, 2, 1]}, UnsupportedModelError, "differs from layer to layer"),
        ({"llama.block_count": None}, ModelFileError, "has no llama.block_count"),
        ({"llama.block_count": "three"}, ModelFileError, "block_count is 'three': it must be a whole number"),
        ({"llama.block_count": 2**31}, ModelFileError, "2147483648 layers, but 29 tensors"),
        ({"llama.attention.head_count": 0}, ModelFileError, "head_count is 0"),
        ({"llama.rope.freq_base": math.nan}, ModelFileError, "freq_base is nan: it must be a finite number"),
        ({"llama.rope.freq_base": -1.0}, ModelFileError, "must be a positive number"),
        ({"tokenizer.ggml.tokens": ["a"] * 301}, ModelFileError, "301 tokens, but 300 rows of token_embd"),
    ],
)
def test_what_is_not_run_is_refused_by_name(
    metadata: dict[str, Any], error: type[KvistError], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=reason) as caught:
        decoder_config(config_of(tmp_path, metadata=metadata))
    assert "\n" not in str(caught.value)


def test_one_number_per_layer_is_fine_if_all_are_the_same(tmp_path: Path) -> None:
    assert config_of(tmp_path, metadata={"llama.attention.head_count_kv": [2, 2, 2]})["num_key_value_heads"] == 2
