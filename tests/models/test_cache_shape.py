"""The cache that a `config.json` asks for, of families that Kvist runs and of others, against transformers'."""

from __future__ import annotations

import pytest
from transformers import AutoConfig
from transformers.cache_utils import DynamicCache

from kvist.config import LayerConfig
from kvist.errors import ModelFileError, UnsupportedModelError
from kvist.models.cache_shape import CacheShape, attention_kind, cache_shape

PLAIN: dict[str, object] = {
    "model_type": "somebody_elses",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "max_position_embeddings": 4096,
}


def shape(**changes: object) -> CacheShape:
    return cache_shape({**PLAIN, **changes})


# --- families that Kvist does not run ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "changes", "num_kv_heads", "head_dim"),
    [
        ("gpt2", {}, 12, 64),
        ("gpt_neox", {}, 64, 96),
        ("falcon", {}, 1, 64),
        (
            "falcon",
            {"new_decoder_architecture": True, "num_kv_heads": 8, "hidden_size": 8192, "num_attention_heads": 128},
            8,
            64,
        ),
        ("gpt_bigcode", {}, 1, 64),
        ("phi3", {"sliding_window": 2047}, 32, 96),
        ("mixtral", {"sliding_window": 4096}, 8, 128),
        ("starcoder2", {"sliding_window": 4096}, 2, 128),
        ("gemma2", {}, 4, 256),
        ("cohere2", {}, 64, 128),
        ("olmo3", {}, 32, 128),
        ("gpt_oss", {}, 8, 64),
        ("qwen2_moe", {}, 16, 128),
        ("qwen3_moe", {}, 4, 64),
        ("dbrx", {"attn_config": {"kv_n_heads": 2}}, 2, 128),
        ("mpt", {}, 16, 128),
        ("mpt", {"attn_config": {"attn_type": "multiquery_attention"}}, 1, 128),
        ("bloom", {"n_head": 4}, 4, 16),
        ("xglm", {}, 16, 64),
        ("llava", {}, 32, 128),
        ("qwen2_5_vl", {}, 8, 128),
    ],
)
def test_other_families_have_the_layers_that_transformers_gives_them(
    model_type: str, changes: dict[str, object], num_kv_heads: int, head_dim: int
) -> None:
    config = AutoConfig.for_model(model_type, **changes)
    found = cache_shape(config.to_dict())
    windows = [getattr(layer, "sliding_window", None) for layer in DynamicCache(config=config).layers]
    assert [layer.window for layer in found.layers] == windows
    assert {(layer.num_kv_heads, layer.head_dim) for layer in found.layers} == {(num_kv_heads, head_dim)}
    assert found.config is None
    assert found.notes[0].startswith("Kvist does not run this model, it only plans its cache: architecture ")


def test_a_configuration_without_layer_types_may_have_a_pattern() -> None:
    gemma2 = shape(model_type="gemma2", sliding_window=9, num_hidden_layers=5)
    assert [layer.window for layer in gemma2.layers] == [9, None, 9, None, 9]
    cohere2 = shape(sliding_window=9, sliding_window_pattern=3)
    assert [layer.window for layer in cohere2.layers] == [9, 9, None, 9]


def test_a_window_that_nobody_places_is_not_counted_on() -> None:
    found = shape(sliding_window=9)
    assert {layer.window for layer in found.layers} == {None}
    assert "sliding_window is 9, but nothing says which layers have it" in found.notes[1]
    assert len(shape(sliding_window=9, use_sliding_window=False).notes) == 1


def test_a_window_of_zero_is_none() -> None:
    found = shape(sliding_window=0, sliding_window_pattern=2)
    assert ({layer.window for layer in found.layers}, len(found.notes)) == ({None}, 1)


@pytest.mark.parametrize(
    ("changes", "num_kv_heads", "head_dim"),
    [
        ({"num_attention_groups": 1, "num_key_value_heads": None}, 1, 8),  # Step 3
        ({"attention_head_dim": 128}, 2, 128),  # Hunyuan-Large
        ({"attn_type_list": [1, 1, 1, 1]}, 2, 8),  # MiniMax-M2
        ({"n_embed": 128, "hidden_size": None}, 2, 16),  # BLOOM, as published
        ({"layer_types": ["attention"] * 4, "mamba_d_state": 256}, 2, 8),  # Granite 4, the dense ones
    ],
)
def test_files_as_families_publish_them_are_read(changes: dict[str, object], num_kv_heads: int, head_dim: int) -> None:
    assert shape(**changes).layers == (LayerConfig(num_kv_heads, head_dim, None),) * 4


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"use_cla": True, "cla_share_factor": 2}, "use_cla is True, which means layers that share keys and values"),
        ({"attn_type_list": [0, 0, 0, 1]}, r"attn_type_list is \[0, 0, 0, 1\], which means layers that keep a state"),
        ({"layer_types": ["mamba", "attention"] * 2, "mamba_d_state": 256}, "mamba_d_state is 256"),
    ],
)
def test_files_as_families_publish_them_are_refused(changes: dict[str, object], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        shape(**changes)


def test_a_family_that_is_run_is_planned_where_a_feature_of_it_is_not() -> None:
    sizes = {"vocab_size": 100, "intermediate_size": 128}
    found = shape(model_type="llama", rope_scaling={"type": "yarn", "factor": 4.0}, **sizes)
    assert (found.model_type, found.config, len(found.layers)) == ("llama", None, 4)
    assert "'yarn' is not supported" in found.notes[0]


def test_a_file_with_the_sizes_alone_is_enough() -> None:
    found = cache_shape({"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32})
    assert found.layers == (LayerConfig(4, 32, None),) * 2
    assert (found.model_type, found.max_context) == ("unknown", None)


def test_the_decoder_of_a_multimodal_model_is_found_sections_down() -> None:
    assert cache_shape({"model_type": "outer", "thinker_config": {"text_config": PLAIN}}).layers == shape().layers


def test_an_encoder_is_told() -> None:
    bert = AutoConfig.for_model("bert", architectures=["BertForMaskedLM"]).to_dict()
    note = "architectures names 'BertForMaskedLM', an encoder: it takes a text at once and keeps no cache"
    assert cache_shape(bert).notes[1:] == (note,)
    for named in (["BertLMHeadModel"], [], None, "BertForMaskedLM", [5]):
        assert len(cache_shape({**bert, "architectures": named}).notes) == 1


@pytest.mark.parametrize(
    ("model_type", "named"),
    [
        ("deepseek_v3", r"kv_lora_rank is 512, which means multi-head latent attention \(MLA\)"),
        ("mamba", "state_size"),
        ("jamba", "attn_layer_period"),
        ("qwen3_next", "linear_num_key_heads"),
        ("falcon_h1", "mamba_d_state"),
        ("lfm2", "full_attn_idxs"),
        ("gemma3n", "num_kv_shared_layers"),
        ("gemma4", "per_layer_config"),
        ("llama4", "attention_chunk_size"),
        ("gpt_neo", "attention_types"),
        ("minimax", "'linear_attention'"),
        ("mimo_v2_flash", "v_head_dim is 128, the head dim 192"),
        ("bart", "is_encoder_decoder"),
    ],
)
def test_caches_that_are_not_keys_and_values_per_head_are_refused_by_name(model_type: str, named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        cache_shape(AutoConfig.for_model(model_type).to_dict())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": None}, "there is no num_hidden_layers: a cache cannot be planned without it"),
        ({"num_attention_heads": None}, "there is no num_attention_heads"),
        ({"hidden_size": None}, "there is no hidden_size"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000: it must be"),
        ({"num_attention_heads": 10**4000}, "num_attention_heads is 1000"),
        ({"num_key_value_heads": 3}, "8 query heads cannot share 3 KV heads"),
        ({"num_key_value_heads": [2, 2, 1, 1]}, r"num_key_value_heads is \[2, 2, 1, 1\]"),
        ({"head_dim": -1}, "head_dim is -1"),
        ({"sliding_window": "9"}, "sliding_window is '9'"),
        ({"layer_types": ["full_attention"]}, "layer_types must list 4 layers"),
        ({"layer_types": ["attention"]}, "layer_types must list 4 layers"),
        ({"text_config": []}, "text_config is"),
        ({"model_type": 5}, "model_type is 5: it must be a text like 'llama'"),
        ({"model_type": "llama", "vocab_size": None}, "no vocab_size"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelFileError, match=message) as refusal:
        shape(**changes)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 300


# --- families that Kvist runs -----------------------------------------------------------------------------------------


def test_a_family_that_is_run_is_read_as_its_decoder_reads_it() -> None:
    raw = {**PLAIN, "model_type": "gemma3_text", "num_hidden_layers": 7, "sliding_window": 9, "head_dim": 16}
    found = cache_shape(raw)
    assert found.config is not None
    assert found.layers == found.config.layers
    assert [layer.window for layer in found.layers] == [9, 9, 9, 9, 9, None, 9]
    assert (found.num_heads, found.num_kv_heads, found.max_context, found.notes) == (8, 2, 4096, ())


# --- other KV heads ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "variants"),
    [
        (32, 8, (32, 16, 8, 4, 1)),
        (9, 3, (9, 3, 1)),
        (4, 1, (4, 2, 1)),
        (8, 8, (8, 4, 1)),
        (1, 1, (1,)),
        (7, 7, (7, 1)),
        (12, 2, (12, 6, 2, 1)),
    ],
)
def test_variants_go_from_a_kv_head_each_to_one_for_all(
    num_heads: int, num_kv_heads: int, variants: tuple[int, ...]
) -> None:
    found = shape(num_attention_heads=num_heads, num_key_value_heads=num_kv_heads)
    assert found.head_variants() == variants
    kinds = [attention_kind(num_heads, variant) for variant in variants]
    assert kinds == ["MHA", *["GQA"] * (len(variants) - 2), *["MQA"] * (len(variants) > 1)]
    assert {layer.num_kv_heads for layer in found.with_kv_heads(1).layers} == {1}


def test_a_lying_number_of_heads_does_not_take_long() -> None:
    found = shape(num_attention_heads=2**31, num_key_value_heads=2**31, hidden_size=2**31)
    assert found.head_variants()[0] == 2**31
