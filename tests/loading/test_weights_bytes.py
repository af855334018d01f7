"""What weights take is known before there are any."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from kvist.config import ModelConfig
from kvist.errors import ModelFileError
from kvist.loading import load
from kvist.loading.weights import weights_bytes
from kvist.models.registry import build_decoder, decoder_config

SIZES: dict[str, object] = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")


def config(model_type: str, **changes: object) -> ModelConfig:
    return decoder_config({**SIZES, "model_type": model_type, **changes})


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_parameter_is_counted_once(model_type: str, tied: bool) -> None:
    of = config(model_type, tie_word_embeddings=tied, use_sliding_window=True, sliding_window=7, max_window_layers=2)
    shapes = [parameter.shape for parameter in build_decoder(of).parameters()]
    assert weights_bytes(of, "bf16") == sum(shape.numel() * (2 if len(shape) == 2 else 4) for shape in shapes)
    assert weights_bytes(of, "fp32") == sum(shape.numel() * 4 for shape in shapes)


def test_no_memory_is_taken_and_no_time_where_a_file_claims_thousands_of_layers() -> None:
    huge = config(
        "llama", hidden_size=2**20, intermediate_size=2**21, num_attention_heads=2**10, num_hidden_layers=9999
    )
    started_s = time.process_time()
    layer, norms = 2**20 * 2**20 * 2 + 2 * 2**20 * 2 * 2**10 + 3 * 2**20 * 2**21, 2 * 2**20
    assert weights_bytes(huge, "bf16") == 9999 * (2 * layer + 4 * norms) + 2 * 2 * 199 * 2**20 + 4 * 2**20
    assert time.process_time() - started_s < 1


def test_sizes_beyond_every_machine_are_refused() -> None:
    with pytest.raises(ModelFileError, match="larger than any machine's memory"):
        weights_bytes(config("llama", hidden_size=2**31, vocab_size=2**31, num_attention_heads=2), "bf16")


def test_a_real_model_takes_what_was_said(smollm2_gguf: Path) -> None:
    for weights_format in ("bf16", "int4"):
        loaded = load("smollm2-135m", weights_format)
        assert weights_bytes(loaded.config, weights_format) == loaded.weights_bytes
    assert not torch.cuda.is_initialized()
