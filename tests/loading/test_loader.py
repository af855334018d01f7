"""Loading gives a decoder with every weight in place, or a one-line reason why not."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_files import (
    END_OF_TEXT,
    IM_END,
    TOKENS,
    VOCAB_SIZE,
    hf_config,
    hf_state,
    hf_tokenizer,
    write_tiny_directory,
    write_tiny_gguf,
)
from transformers import AutoConfig, AutoModelForCausalLM

from kvist.errors import KvistError, ModelFileError, OptionError, UnsupportedModelError
from kvist.loading import load
from kvist.loading.gguf_blocks import dequantise
from kvist.loading.gguf_checkpoint import GgufCheckpoint
from kvist.loading.gguf_file import GgufFile
from kvist.models.layers import DecoderLayer
from kvist.models.matrices import WideEmbedding, WideLinear

pytestmark = pytest.mark.usefixtures("own_cache")


def parameters(decoder: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(decoder.named_parameters())


# --- what is loaded ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "gemma3_text"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_directory_that_transformers_saved_loads_whole(model_type: str, tied: bool, tmp_path: Path) -> None:
    sizes = {key: value for key, value in hf_config().items() if key not in ("model_type", "tie_word_embeddings")}
    config = AutoConfig.for_model(model_type, **sizes, tie_word_embeddings=tied, pad_token_id=None)
    oracle = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    oracle.save_pretrained(tmp_path, max_shard_size="100KB")
    hf_tokenizer(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model = load(str(tmp_path), "fp32")
    found = parameters(model.decoder)
    expected = {name.removeprefix("model."): value for name, value in oracle.named_parameters()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert model.weights_bytes == sum(4 * value.numel() for value in expected.values())


@pytest.mark.parametrize(("weights_format", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_a_gguf_file_loads_like_the_directory_it_is_prepared_into(
    weights_format: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    state = hf_state("qwen3", tied=False)
    model = load(str(write_tiny_gguf(tmp_path / "tiny.gguf", "qwen3", state)), weights_format)
    found = parameters(model.decoder)
    dtypes = {name: dtype if value.dim() == 2 else torch.float32 for name, value in state.items()}
    assert all(torch.equal(found[name.removeprefix("model.")], state[name].to(dtypes[name])) for name in state)
    assert all(found[name.removeprefix("model.")].dtype == dtypes[name] for name in state)
    assert len(found) == len(state)
    assert model.config.model_type == "qwen3"
    assert model.eos_token_ids == {END_OF_TEXT, IM_END}
    assert model.tokenizer.encode("abé") == [TOKENS.index("ab"), *model.tokenizer.encode("é")]
    assert (model.name, model.weights_format) == ("tiny", weights_format)
    assert model.weights_bytes == sum(value.numel() * dtypes[name].itemsize for name, value in state.items())


def test_a_gguf_models_quantised_blocks_stay_within_reach(tmp_path: Path) -> None:
    model = load(write_tiny_gguf(tmp_path / "tiny.gguf", "qwen3", tensor_type="Q4_1"), "fp32")
    assert model.source == tmp_path / "tiny.gguf"
    stored = GgufCheckpoint(GgufFile(model.source), model.config)
    name = "layers.1.mlp.down_proj.weight"
    codes = stored.codes(f"model.{name}")
    assert codes is not None
    values = torch.from_numpy(dequantise(codes.blocks.numpy(), codes.ggml_type))
    assert torch.equal(values, parameters(model.decoder)[name])
    directory = write_tiny_directory(tmp_path / "model")
    assert load(directory).source == directory


def test_the_decoder_is_ready_to_run_and_wants_no_gradients(tmp_path: Path) -> None:
    model = load(str(write_tiny_directory(tmp_path)))
    assert not model.decoder.training
    assert not any(parameter.requires_grad for parameter in model.decoder.parameters())
    assert not any(parameter.is_meta for parameter in model.decoder.parameters())
    kinds = {(parameter.dim(), parameter.dtype) for parameter in model.decoder.parameters()}
    assert kinds == {(2, torch.bfloat16), (1, torch.float32)}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_a_model_in_bf16_runs_natively(architecture: str, tied: bool, tmp_path: Path) -> None:
    state = hf_state(architecture, tied=tied and architecture != "gemma3")
    decoder = load(str(write_tiny_gguf(tmp_path / "tiny.gguf", architecture, state)), "bf16").decoder
    layers = [module for module in decoder.modules() if isinstance(module, DecoderLayer)]
    assert [layer.native is not None and layer.native.handle is not None for layer in layers] == [True] * len(layers)
    output = decoder.embed_tokens if decoder.lm_head is None else decoder.lm_head
    assert isinstance(output, WideEmbedding | WideLinear)
    assert output.native is not None


def test_names_without_the_models_prefix_and_a_repeated_embedding_are_fine(tmp_path: Path) -> None:
    state = {name.removeprefix("model."): value for name, value in hf_state("llama").items()}
    state["lm_head.weight"] = state["embed_tokens.weight"].clone()
    model = load(str(write_tiny_directory(tmp_path, state)), "fp32")
    assert torch.equal(parameters(model.decoder)["norm.weight"], state["norm.weight"])


def test_the_text_part_of_a_multimodal_gemma_loads_and_the_rest_is_left_alone(tmp_path: Path) -> None:
    state = hf_state("gemma3")
    multimodal = {name.replace("model.", "language_model.model.", 1): value for name, value in state.items()}
    multimodal["vision_tower.vision_model.post_layernorm.weight"] = torch.ones(8)
    multimodal["multi_modal_projector.mm_soft_emb_norm.weight"] = torch.ones(8)
    text_config = hf_config("gemma3_text", sliding_window=16, query_pre_attn_scalar=32)
    config = {"model_type": "gemma3", "text_config": text_config, "vision_config": {}, "eos_token_id": [1, 106]}
    model = load(str(write_tiny_directory(tmp_path, multimodal, config=config)), "fp32")
    assert model.config.model_type == "gemma3"
    assert model.eos_token_ids == {1, 106}
    found = parameters(model.decoder)
    assert found.keys() == {name.removeprefix("model.") for name in state}
    assert all(torch.equal(found[name.removeprefix("model.")], value) for name, value in state.items())


def test_end_tokens_come_from_the_generation_config_or_the_tokenizer(tmp_path: Path) -> None:
    directory = write_tiny_directory(tmp_path)
    assert load(str(directory)).eos_token_ids == {IM_END}
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    assert load(str(directory)).eos_token_ids == {1, 2}


@pytest.mark.parametrize("weights_format", ["bf16", "int8"])
def test_loading_brings_in_no_decompositions(weights_format: str, tmp_path: Path) -> None:
    """PyTorch imports them to draw random values on the meta device, for a second and 57 MB."""
    write_tiny_directory(tmp_path)
    program = (
        "import sys; from kvist.loading.loader import load; "
        f"load({str(tmp_path)!r}, {weights_format!r}); print('sympy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_listing_and_pulling_need_no_torch() -> None:
    program = "import sys, kvist.loading.pull, kvist.loading.prepared; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# --- what is refused --------------------------------------------------------------------------------------------------


def refusal(directory: Path, error: type[KvistError] = ModelFileError) -> str:
    with pytest.raises(error) as caught:
        load(str(directory))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def changed(directory: Path, change: Callable[[dict[str, torch.Tensor]], object], **config: Any) -> Path:
    state = hf_state("llama")
    change(state)
    return write_tiny_directory(directory, state, config=hf_config(**config))


def test_missing_left_over_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    def without_mlps(state: dict[str, torch.Tensor]) -> None:
        for name in [name for name in state if "mlp" in name]:
            del state[name]

    lacking = "layers.0.mlp.down_proj.weight, layers.0.mlp.gate_proj.weight, layers.0.mlp.up_proj.weight and 6 more"
    assert f"it lacks {lacking}" in refusal(changed(tmp_path / "a", without_mlps))
    extra = changed(tmp_path / "b", lambda state: state.update({"model.layers.3.mlp.up_proj.weight": torch.ones(1)}))
    assert "it also holds layers.3.mlp.up_proj.weight" in refusal(extra)
    shape = changed(tmp_path / "c", lambda state: state.update({"model.norm.weight": torch.ones(63)}))
    assert "shapes differ: norm.weight (63,) for (64,)" in refusal(shape)
    vocabulary = changed(tmp_path / "d", lambda state: None, vocab_size=VOCAB_SIZE + 1)
    assert "embed_tokens.weight (300, 64) for (301, 64)" in refusal(vocabulary)


def test_one_tensor_under_two_names_is_refused(tmp_path: Path) -> None:
    twice = changed(tmp_path, lambda state: state.update({"norm.weight": torch.ones(64)}))
    assert "one tensor under two names, model.norm.weight, norm.weight; fetch it again" in refusal(twice)


def larger_tokenizer(directory: Path, *, special: bool) -> None:
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    kind = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    next_id = len(TOKENS)
    for index in range(next_id, VOCAB_SIZE + 1):
        # A special token that lies beyond the embedding, or an ordinary one.
        last = index == VOCAB_SIZE
        tokenizer["added_tokens"].append({"id": index, "content": f"<{index}>", "special": special or not last, **kind})
    path.write_text(json.dumps(tokenizer))


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    directory = write_tiny_directory(tmp_path)
    larger_tokenizer(directory, special=False)
    assert "the vocabulary does not match: the tokenizer has 301 tokens, the model 300; fetch it" in refusal(directory)


def test_a_tokenizer_that_fails_while_it_is_checked_is_refused_with_its_path(tmp_path: Path) -> None:
    directory = write_tiny_directory(tmp_path)
    larger_tokenizer(directory, special=False)
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    tokenizer["added_tokens"][-1]["content"] = "漢"
    tokenizer["decoder"] = {"type": "Strip", "content": "漢", "start": 5, "stop": 5}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert refusal(directory).startswith(f"{directory / 'tokenizer.json'}: the model's tokenizer fails on these tokens")


def test_a_special_token_beyond_the_embedding_is_no_mismatch(tmp_path: Path) -> None:
    directory = write_tiny_directory(tmp_path)
    larger_tokenizer(directory, special=True)
    assert load(str(directory)).tokenizer.vocab_size == VOCAB_SIZE + 1


@pytest.mark.parametrize("text", ["", "{", "[1]", '"x"', "\xff", "[" * 100_000, "<html>"])
def test_a_damaged_configuration_is_refused(text: str, tmp_path: Path) -> None:
    directory = write_tiny_directory(tmp_path)
    (directory / "config.json").write_text(text, encoding="latin-1")
    assert "config.json" in refusal(directory)


@pytest.mark.parametrize(
    ("config", "error", "reason"),
    [
        ({"model_type": "falcon"}, UnsupportedModelError, "architecture 'falcon' is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, UnsupportedModelError, "rope type 'yarn'"),
        ({"num_hidden_layers": 2**40}, ModelFileError, "num_hidden_layers"),
        ({"num_hidden_layers": 10_000}, ModelFileError, "10000 layers, but 29 tensors"),
        ({"hidden_size": -64}, ModelFileError, "hidden_size is -64"),
        ({"quantization_config": {"quant_method": "gptq"}}, UnsupportedModelError, "quantised with 'gptq'"),
        ({"eos_token_id": "</s>"}, ModelFileError, "eos_token_id is '</s>'"),
    ],
)
def test_a_configuration_that_is_not_run_is_refused_by_name(
    config: dict[str, Any], error: type[KvistError], reason: str, tmp_path: Path
) -> None:
    message = refusal(write_tiny_directory(tmp_path, config=hf_config() | config), error)
    assert reason in message
    assert message.startswith(str(tmp_path))


def test_what_is_wrong_with_a_gguf_file_begins_with_its_path(tmp_path: Path) -> None:
    """Also where it only shows in the configuration that is made of it, or in its tokenizer."""
    for index, metadata in enumerate(({"llama.attention.head_count_kv": 3}, {"tokenizer.ggml.merges": ["zz"]})):
        path = write_tiny_gguf(tmp_path / f"{index}.gguf", metadata=metadata)
        message = refusal(path)
        assert message.startswith(f"{path}: ")
        assert "config.json" not in message


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    directory = write_tiny_directory(tmp_path)
    (directory / "tokenizer.json").unlink()
    assert "tokenizer.json is missing" in refusal(directory)


def test_an_unknown_weights_format_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="unknown weights_format 'int3': did you mean"):
        load(str(tmp_path / "absent"), "int3")


def test_a_gguf_that_is_refused_is_refused_again_and_leaves_no_copy(tmp_path: Path, own_cache: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:-5000])
    for _ in range(2):
        assert "is truncated or damaged" in refusal(path)
    assert not (own_cache / "prepared").exists()


def test_a_model_stays_usable_when_its_files_go_away(tmp_path: Path) -> None:
    directory = write_tiny_directory(tmp_path / "model")
    model = load(str(directory), "fp32")
    before = {name: value.clone() for name, value in parameters(model.decoder).items()}
    shutil.rmtree(directory)
    assert all(torch.equal(value, before[name]) for name, value in parameters(model.decoder).items())
