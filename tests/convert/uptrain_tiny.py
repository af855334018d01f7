"""A tiny teacher, its student with one KV head, and a text that both read."""

from __future__ import annotations

from pathlib import Path

import torch
from tiny_files import HEAD_DIM, NUM_KV_HEADS, hf_config, hf_state, write_tiny_directory

TEXT = "The twig wanted to be a tree, and the tree wanted to be a wood; so they grew, slowly. " * 12


def write_teacher(directory: Path, *, seed: int = 0) -> Path:
    return write_tiny_directory(directory, hf_state("llama", seed=seed))


def write_student(directory: Path, *, num_shards: int = 1, dtype: torch.dtype = torch.float32) -> Path:
    """The teacher's weights with all KV heads of a layer merged into their mean."""
    state = hf_state("llama")
    for name, tensor in state.items():
        is_shared = "k_proj" in name or "v_proj" in name
        merged = tensor.view(NUM_KV_HEADS, HEAD_DIM, -1).mean(0) if is_shared else tensor
        state[name] = merged.to(dtype).contiguous()
    return write_tiny_directory(directory, state, config=hf_config(num_key_value_heads=1), num_shards=num_shards)


def write_text(path: Path, text: str = TEXT) -> Path:
    path.write_text(text, encoding="utf-8")
    return path
