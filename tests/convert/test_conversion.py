"""Converted checkpoints: what they compute, what is carried over, and how they load."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from convert_fakes import (
    FAMILIES,
    NUM_HEADS,
    NUM_KV_HEADS,
    change_state,
    logits_of_kvist,
    logits_of_transformers,
    same_bits,
    state_of,
)
from safetensors.torch import load_file, save_file
from tiny_files import hf_state, write_tiny_gguf
from transformers import AutoTokenizer

from kvist.convert import expand, to_gqa
from kvist.convert.gqa_config import METHODS, GqaConfig
from kvist.errors import UnsupportedModelError
from kvist.loading import load
from kvist.loading.tokenizer import Tokenizer

TOLERANCE = 1e-4


def merged(source: Path, num_kv_heads: int, method: str = "mean", text: Path | None = None, **options: object) -> Path:
    destination = source.with_name(f"{source.name}-{method}-{num_kv_heads}")
    config = GqaConfig(method, window=32, windows=6)
    calibrated = text if config.is_calibrated else None
    to_gqa(source, destination, num_kv_heads, config=config, text=calibrated, **options)  # type: ignore[arg-type]
    return destination


def expanded(source: Path) -> Path:
    destination = source.with_name(f"{source.name}-expanded")
    expand(source, destination)
    return destination


# --- the result loads and is the same model everywhere ----------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", METHODS)
def test_transformers_and_kvist_give_the_same_logits(checkpoint, text, family, method):
    source = checkpoint(family)
    destination = merged(source, 2, method, text)
    assert load(destination, "fp32").config.num_kv_heads == 2
    theirs = logits_of_transformers(destination)
    assert (logits_of_kvist(destination) - theirs).abs().max() < TOLERANCE
    assert (theirs - logits_of_transformers(source)).abs().max() > 100 * TOLERANCE, "the source's logits are not ours"


@pytest.mark.parametrize("family", FAMILIES)
def test_expanding_changes_no_logit(checkpoint, family):
    source = checkpoint(family)
    destination = expanded(source)
    assert load(destination, "fp32").config.num_kv_heads == NUM_HEADS
    assert (logits_of_transformers(destination) - logits_of_transformers(source)).abs().max() < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_expanding_and_merging_back_by_the_mean_gives_the_bytes(checkpoint, family, dtype):
    source = checkpoint(family, dtype=dtype)
    change_state(source, {"model.layers.0.self_attn.k_proj.weight": _awkward(state_of(source))})
    back = merged(expanded(source), NUM_KV_HEADS)
    assert same_bits(state_of(back), state_of(source))
    assert json.loads((back / "config.json").read_text()) == json.loads((source / "config.json").read_text())


def _awkward(state: dict[str, torch.Tensor]) -> torch.Tensor:
    """Keys with numbers that a careless mean changes: negative zero, the smallest and largest of the dtype."""
    keys = state["model.layers.0.self_attn.k_proj.weight"].clone()
    limits = torch.finfo(keys.dtype)
    keys[0, :5] = torch.tensor([-0.0, limits.max, limits.min, limits.smallest_normal, 1 / 3], dtype=keys.dtype)
    return keys


def test_three_heads_of_a_group_are_merged_back_to_the_bytes_too(checkpoint):
    """Sums of three equal numbers do not halve exactly."""
    source = checkpoint(num_attention_heads=6, num_key_value_heads=2, hidden_size=48, dtype=torch.bfloat16)
    assert same_bits(state_of(merged(expanded(source), 2)), state_of(source))


def test_the_tokenizer_and_what_else_belongs_to_a_model_come_along(checkpoint):
    source = checkpoint()
    (source / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (source / "LICENSE").write_text("free")
    (source / "optimizer.pt").write_bytes(b"not wanted")
    for other in ("pytorch_model.bin.index.json", "tf_model.h5.index.json", "adapter_config.json"):
        (source / other).write_text("{}")
    (source / ".hidden").mkdir()
    destination = merged(source, 2)
    assert {path.name for path in destination.iterdir()} == {
        "config.json", "conversion.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json", "chat_template.jinja", "LICENSE",
    }  # fmt: skip
    ids = AutoTokenizer.from_pretrained(destination).encode("a twig")
    assert (
        ids
        == AutoTokenizer.from_pretrained(source).encode("a twig")
        == Tokenizer.from_directory(source).encode("a twig")
    )


# --- what becomes of which tensor -------------------------------------------------------------------------------------


def test_first_and_mean_take_neighbours_and_leave_the_rest(checkpoint):
    source = checkpoint("qwen2")
    old = state_of(source)
    first, mean = state_of(merged(source, 2, "first")), state_of(merged(source, 2, "mean"))
    changed = {name for name in old if not torch.equal(old[name], mean.get(name, torch.empty(0)))}
    assert changed == {
        f"model.layers.{layer}.self_attn.{side}_proj.{kind}"
        for layer in range(3)
        for side in "kv"
        for kind in ("weight", "bias")
    }
    for name in changed:
        heads = old[name].reshape(NUM_KV_HEADS, 8, -1)
        assert torch.equal(first[name], torch.cat((heads[0], heads[2])).reshape(first[name].shape))
        by_hand = torch.cat(((heads[0] + heads[1]) / 2, (heads[2] + heads[3]) / 2)).reshape(mean[name].shape)
        torch.testing.assert_close(mean[name], by_hand, rtol=1e-6, atol=1e-7)


def test_expanding_repeats_neighbours(checkpoint):
    source = checkpoint()
    name = "model.layers.1.self_attn.v_proj.weight"
    heads = state_of(expanded(source))[name].reshape(NUM_HEADS, 8, 64)
    assert torch.equal(
        heads, state_of(source)[name].reshape(NUM_KV_HEADS, 1, 8, 64).expand(-1, 2, -1, -1).flatten(0, 1)
    )


@pytest.mark.parametrize("method", ["mean", "fitted"])
def test_shards_stay_shards_though_each_layer_lies_in_all_of_them(checkpoint, text, method, tmp_path):
    source = checkpoint("llama_mqa_biased", dtype=torch.bfloat16)
    whole = state_of(merged(source, 1, method, text))
    shutil.rmtree(source)
    sharded = checkpoint("llama_mqa_biased", dtype=torch.bfloat16, num_shards=3).rename(tmp_path / "sharded")
    destination = merged(sharded, 1, method, text)
    assert same_bits(state_of(destination), whole)
    index = json.loads((destination / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    assert (logits_of_kvist(destination) - logits_of_transformers(destination)).abs().max() < TOLERANCE


def test_a_gguf_file_is_dequantised(tmp_path):
    state = hf_state("llama")
    gguf = write_tiny_gguf(tmp_path / "tiny.gguf", state=state, tensor_type="Q8_0")
    to_gqa(gguf, tmp_path / "bf16", 1)
    to_gqa(gguf, tmp_path / "fp32", 1, weights_format="fp32")
    kinds = {(tensor.dim(), tensor.dtype) for tensor in state_of(tmp_path / "bf16").values()}
    assert kinds == {(2, torch.bfloat16), (1, torch.float32)}
    name = "model.layers.0.self_attn.v_proj.weight"
    ours = state_of(tmp_path / "fp32")[name]
    assert ours.dtype == torch.float32
    assert (ours - state[name].reshape(2, 32, 64).mean(0)).abs().max() < 0.03  # what Q8_0 loses
    assert (logits_of_kvist(tmp_path / "fp32") - logits_of_transformers(tmp_path / "fp32")).abs().max() < 1e-3
    assert AutoTokenizer.from_pretrained(tmp_path / "fp32").encode("ab") == Tokenizer.from_directory(
        tmp_path / "fp32"
    ).encode("ab")


def test_other_modalities_are_carried_byte_by_byte(checkpoint):
    source = checkpoint("gemma3")
    vision = {"vision_tower.positions": torch.arange(9), "multi_modal_projector.w": torch.rand(3, 5)}
    text_state = {f"language_model.{name}": tensor for name, tensor in load_file(source / "model.safetensors").items()}
    save_file({**text_state, **vision}, source / "model.safetensors", {"format": "pt"})
    raw = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": raw, "mm_tokens": 4}))
    destination = merged(source, 1)
    state = state_of(destination)
    assert state.keys() == {**text_state, **vision}.keys()
    assert same_bits({name: state[name] for name in vision}, vision)
    config = json.loads((destination / "config.json").read_text())
    assert config == {"model_type": "gemma3", "text_config": {**raw, "num_key_value_heads": 1}, "mm_tokens": 4}
    assert load(destination, "fp32").config.num_kv_heads == 1


def test_packed_weights_are_refused(checkpoint):
    source = checkpoint()
    (source / "packed.json").write_text("{}")
    with pytest.raises(UnsupportedModelError, match="packed weights, which are not converted"):
        merged(source, 2)


# --- the record -------------------------------------------------------------------------------------------------------


def test_the_record_says_what_was_done_and_what_was_done_before(checkpoint, text):
    source = checkpoint(num_hidden_layers=2)
    many = expanded(source)
    destination = merged(many, 4, "fitted", text)
    record = json.loads((destination / "conversion.json").read_text())
    assert (record["conversion"], record["method"], record["source"]) == ("gqa", "fitted", many.name)
    assert (record["num_heads"], record["source_num_kv_heads"], record["num_kv_heads"]) == (8, 8, 4)
    assert record["calibration"]["text"] == "text.txt"
    assert (record["calibration"]["window"], record["calibration"]["windows"]) == (32, 6)
    assert len(record["layers"]) == 2
    for layer in record["layers"]:
        assert sorted(head for group in layer["groups"] for head in group) == list(range(8))
        assert 0 <= layer["missed"] < 1
    earlier = record["earlier"]
    assert (earlier["conversion"], earlier["source_num_kv_heads"], earlier["num_kv_heads"]) == ("expand", 4, 8)
    assert earlier["source_hash"] != record["source_hash"]


def test_the_same_conversion_gives_the_same_bytes(checkpoint, text):
    source = checkpoint("qwen2")
    first = merged(source, 2, "fitted", text)
    before = {path.name: path.read_bytes() for path in first.iterdir()}
    merged(source, 2, "fitted", text, force=True)
    assert {path.name: path.read_bytes() for path in first.iterdir()} == before
