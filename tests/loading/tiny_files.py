"""Tiny model files, written as other programs write them: GGUF by llama.cpp's rules, safetensors directories."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.constants import MODEL_ARCH_NAMES
from gguf.quants import quantize
from safetensors.torch import save_file

VOCAB_SIZE = 300
NUM_LAYERS = 3
EMBED_DIM = 64
MLP_DIM = 96
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 32

# Bytes as GPT-2 writes them, then specials: a whole byte-level vocabulary.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_BYTES = [chr(b) if b in _PRINTABLE else None for b in range(256)]
_OTHERS = iter(range(256, 512))
TOKENS = [char or chr(next(_OTHERS)) for char in _BYTES] + ["<|bos|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS += ["ab", "cd"]
BOS, END_OF_TEXT, IM_START, IM_END = range(256, 260)
_CONTROL = 3

VOCABULARY = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [1] * 256 + [_CONTROL] * 4 + [1] * 2,
    "tokenizer.ggml.merges": ["a b", "c d"],
    "tokenizer.ggml.bos_token_id": BOS,
    "tokenizer.ggml.eos_token_id": IM_END,
}


def hf_state(architecture: str, *, tied: bool = True, biased: bool = False, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights of a tiny model under their Hugging Face names, float32."""
    generator = torch.Generator().manual_seed(seed)
    queries, keys = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB_SIZE, EMBED_DIM)}
    shapes["model.norm.weight"] = (EMBED_DIM,)
    if not tied:
        shapes["lm_head.weight"] = (VOCAB_SIZE, EMBED_DIM)
    for layer in range(NUM_LAYERS):
        names: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (EMBED_DIM,),
            "post_attention_layernorm.weight": (EMBED_DIM,),
            "self_attn.q_proj.weight": (queries, EMBED_DIM),
            "self_attn.k_proj.weight": (keys, EMBED_DIM),
            "self_attn.v_proj.weight": (keys, EMBED_DIM),
            "self_attn.o_proj.weight": (EMBED_DIM, queries),
            "mlp.gate_proj.weight": (MLP_DIM, EMBED_DIM),
            "mlp.up_proj.weight": (MLP_DIM, EMBED_DIM),
            "mlp.down_proj.weight": (EMBED_DIM, MLP_DIM),
        }
        if architecture in ("qwen3", "gemma3"):
            names |= {"self_attn.q_norm.weight": (HEAD_DIM,), "self_attn.k_norm.weight": (HEAD_DIM,)}
        if architecture == "gemma3":
            names |= {f"{when}_feedforward_layernorm.weight": (EMBED_DIM,) for when in ("pre", "post")}
        if architecture == "qwen2" or biased:
            names |= {"self_attn.q_proj.bias": (queries,), "self_attn.k_proj.bias": (keys,)}
            names |= {"self_attn.v_proj.bias": (keys,)}
        if biased:
            names |= {"self_attn.o_proj.bias": (EMBED_DIM,)}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in names.items()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def hyperparameters(architecture: str) -> dict[str, Any]:
    """The metadata that describes `hf_state`."""
    return {
        f"{architecture}.{key}": value
        for key, value in {
            "block_count": NUM_LAYERS,
            "context_length": 512,
            "embedding_length": EMBED_DIM,
            "feed_forward_length": MLP_DIM,
            "attention.head_count": NUM_HEADS,
            "attention.head_count_kv": NUM_KV_HEADS,
            "attention.key_length": HEAD_DIM,
            "attention.value_length": HEAD_DIM,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.freq_base": 50_000.0,
        }.items()
    }


def stored_as_llama_cpp_does(architecture: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """What llama.cpp's converter changes in a tensor on its way into a GGUF."""
    if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
        heads = NUM_HEADS if "q_proj" in name else NUM_KV_HEADS
        halves = tensor.reshape(heads, 2, len(tensor) // heads // 2, *tensor.shape[1:])
        return halves.swapaxes(1, 2).reshape(tensor.shape)
    if architecture == "gemma3" and name.endswith("norm.weight"):
        return tensor + 1
    return tensor


def write_tiny_gguf(
    path: Path,
    architecture: str = "llama",
    state: Mapping[str, torch.Tensor] | None = None,
    *,
    tensor_type: str = "F32",
    metadata: Mapping[str, Any] | None = None,
    extra_tensors: Mapping[str, np.ndarray[Any, Any]] | None = None,
) -> Path:
    """A whole tiny model: matrices as `tensor_type`, vectors as F32; a None in `metadata` leaves a key out."""
    state = hf_state(architecture) if state is None else state
    kind = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(kind, NUM_LAYERS)
    tensors: dict[str, tuple[np.ndarray[Any, Any], str]] = {}
    for name, tensor in state.items():
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, name
        values = stored_as_llama_cpp_does(architecture, name, tensor).float().numpy()
        tensors[gguf_name] = (values, tensor_type if values.ndim > 1 else "F32")
    tensors |= {name: (values, "F32") for name, values in (extra_tensors or {}).items()}
    return write_gguf(path, architecture, {**hyperparameters(architecture), **VOCABULARY, **(metadata or {})}, tensors)


def write_gguf(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[np.ndarray[Any, Any], str]],
) -> Path:
    """A GGUF file by gguf's own writer. Values are quantised to the type beside them; uint8 blocks are kept."""
    writer = GGUFWriter(path, architecture)
    for key, value in metadata.items():
        match value:
            case None:
                continue
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
    for name, (values, type_name) in tensors.items():
        tensor_type = GGMLQuantizationType[type_name]
        stored = values if values.dtype == np.uint8 else quantize(values, tensor_type)
        writer.add_tensor(name, np.ascontiguousarray(stored), raw_dtype=tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def hf_tokenizer(directory: Path) -> None:
    """The same vocabulary as `tokenizer.json` and `tokenizer_config.json`."""
    added = [
        {"id": index, "content": TOKENS[index], "special": True, "normalized": False, "single_word": False,
         "lstrip": False, "rstrip": False}
        for index in range(256, 260)
    ]  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": {token: index for index, token in enumerate(TOKENS)}}
    model["merges"] = ["a b", "c d"]
    tokenizer = {"version": "1.0", "added_tokens": added, "pre_tokenizer": byte_level, "decoder": byte_level}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer | {"model": model}))
    config = {"bos_token": "<|bos|>", "eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def hf_config(model_type: str = "llama", **changes: Any) -> dict[str, Any]:
    """A `config.json` that describes `hf_state`."""
    return {
        "model_type": model_type,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": EMBED_DIM,
        "intermediate_size": MLP_DIM,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50_000.0,
        "tie_word_embeddings": True,
        **changes,
    }


def write_tiny_directory(
    directory: Path,
    state: Mapping[str, torch.Tensor] | None = None,
    *,
    config: Mapping[str, Any] | None = None,
    num_shards: int = 1,
) -> Path:
    """A tiny llama in Hugging Face format, with tokenizer; in shards with an index where there are several."""
    state = hf_state("llama") if state is None else state
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(hf_config() if config is None else config))
    hf_tokenizer(directory)
    if num_shards == 1:
        save_file(dict(state), directory / "model.safetensors", {"format": "pt"})
        return directory
    weight_map = {}
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        names = sorted(state)[shard::num_shards]
        save_file({name: state[name] for name in names}, directory / file_name, {"format": "pt"})
        weight_map |= dict.fromkeys(names, file_name)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory
