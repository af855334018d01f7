"""A tiny teacher, its student with one KV head, a text that both read, and trainings of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_files import HEAD_DIM, NUM_KV_HEADS, hf_config, hf_state, write_tiny_directory

from kvist.convert.uptrain import Uptraining
from kvist.convert.uptrain_config import UptrainConfig
from kvist.convert.uptrain_curve import CurveRow
from kvist.evaluate.text_windows import EvaluationText

TEXT = "The twig wanted to be a tree, and the tree wanted to be a wood; so they grew, slowly. " * 12
TRAINED_ON = EvaluationText.of(TEXT.encode(), "twig.txt")
SETTINGS: dict[str, Any] = {"sequence": 16, "batch": 2, "learning_rate": 2e-3, "compute": "fp32"}


def write_teacher(directory: Path, *, seed: int = 0) -> Path:
    return write_tiny_directory(directory, hf_state("llama", seed=seed))


def student_state(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """The teacher's weights with all KV heads of a layer merged into their mean."""
    state = hf_state("llama")
    for name, tensor in state.items():
        is_shared = "k_proj" in name or "v_proj" in name
        merged = tensor.view(NUM_KV_HEADS, HEAD_DIM, -1).mean(0) if is_shared else tensor
        state[name] = merged.to(dtype).contiguous()
    return state


def write_student(
    directory: Path,
    state: Mapping[str, torch.Tensor] | None = None,
    *,
    num_shards: int = 1,
    dtype: torch.dtype = torch.float32,
    **fields: object,
) -> Path:
    """With other weights and fields of its configuration, as given."""
    config = hf_config(num_key_value_heads=1, **fields)
    return write_tiny_directory(directory, state or student_state(dtype), config=config, num_shards=num_shards)


def write_text(path: Path, text: str = TEXT) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def train_config(steps: int | None = 6, **changes: Any) -> UptrainConfig:
    return UptrainConfig(**{"steps": steps, **SETTINGS, **changes})


def training(student: Path, teacher: Path, config: UptrainConfig | None = None, **options: Any) -> Uptraining:
    texts = options.pop("texts", [TRAINED_ON])
    return Uptraining(student, str(teacher), texts, config or train_config(), **options)


def stopping_at(step: int, error: type[BaseException] = KeyboardInterrupt) -> Callable[[CurveRow], None]:
    def told(row: CurveRow) -> None:
        if row.step == step:
            raise error

    return told


def stopped(begun: Uptraining, step: int) -> None:
    """Train until Ctrl-C comes after a step."""
    with pytest.raises(KeyboardInterrupt):
        begun.run(stopping_at(step))


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def same_weights(directory: Path, expected: Mapping[str, torch.Tensor]) -> bool:
    found = weights(directory)
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}
