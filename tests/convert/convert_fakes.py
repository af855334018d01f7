"""Tiny checkpoints, and what the suite asks of converted ones."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny import new_cache, run_step, tiny_oracle
from tiny_files import VOCAB_SIZE, hf_tokenizer
from transformers import AutoModelForCausalLM

from kvist.loading import load

NUM_HEADS, NUM_KV_HEADS = 8, 4
TOKENS = [(7 * i * i + 3 * i) % 250 for i in range(40)]

# Of each kind that a conversion must not mistake for another: rope, biases, norms over queries and keys, windows.
FAMILIES = (
    "llama", "llama_wide_heads", "llama_llama3_rope", "llama_mqa_biased", "mistral_windowed", "qwen2", "qwen3",
    "qwen3_tied_biased", "gemma3", "gemma3_capped",
)  # fmt: skip
NORMED = ("qwen3", "qwen3_tied_biased", "gemma3", "gemma3_capped")


def write_checkpoint(
    directory: Path, family: str, *, dtype: torch.dtype = torch.float32, num_shards: int = 1, **fields: object
) -> Path:
    shape = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
    }
    tiny_oracle(family, **{**shape, **fields}).to(dtype).save_pretrained(directory)
    hf_tokenizer(directory)
    if num_shards > 1:
        spread(directory, num_shards)
    return directory


def spread(directory: Path, num_shards: int) -> None:
    """Deal the tensors of a directory out to shards, so that each layer lies in all of them."""
    state = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    weight_map = {}
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        names = sorted(state)[shard::num_shards]
        save_file({name: state[name] for name in names}, directory / file_name, {"format": "pt"})
        weight_map |= dict.fromkeys(names, file_name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def state_of(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a directory, from one file or several."""
    return {
        name: tensor for file in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }


def change_state(directory: Path, change: dict[str, torch.Tensor]) -> None:
    state = load_file(directory / "model.safetensors")
    assert change.keys() <= state.keys()
    save_file({**state, **change}, directory / "model.safetensors", {"format": "pt"})


def same_bits(ours: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == others.keys() and all(
        tensor.dtype == others[name].dtype
        and tensor.shape == others[name].shape
        and torch.equal(tensor.view(torch.uint8), others[name].view(torch.uint8))
        for name, tensor in ours.items()
    )


@torch.inference_mode()
def logits_of_transformers(directory: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    logits: torch.Tensor = model(torch.tensor([TOKENS])).logits[0]
    return logits


def logits_of_kvist(directory: Path) -> torch.Tensor:
    decoder = load(directory, "fp32").decoder
    cache = new_cache(decoder)
    sequence = cache.open()
    return run_step(decoder, cache, {sequence: TOKENS})[sequence]
