"""The two real models load fast and lean, the first time and later."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvist.loading import load
from kvist.loading.gguf_checkpoint import GgufCheckpoint
from kvist.loading.gguf_config import hf_config
from kvist.loading.gguf_file import GgufFile
from kvist.loading.prepared import prepared_copy
from kvist.loading.progress import no_progress
from kvist.loading.safetensors_checkpoint import SafetensorsCheckpoint
from kvist.models.registry import decoder_config

SMOLLM2, GEMMA3 = "smollm2_gguf", "gemma3_gguf"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def shared_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One cache folder for this file's tests, so that each model is prepared once per format.

    A test asks for it after the model's file, which is found in the cache folder of the user.
    """
    monkeypatch.setenv("KVIST_CACHE", str(folder))


@pytest.fixture
def gguf(fixture: str, request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(fixture)
    return path


def measured_load(model: Path, weights_format: str) -> dict[str, float]:
    command = [sys.executable, str(Path(__file__).parent / "peak_memory.py"), str(model), weights_format]
    # Where AddressSanitizer is at work, it must not keep what was freed: that is what is counted.
    environment = os.environ | {"ASAN_OPTIONS": f"{os.environ.get('ASAN_OPTIONS', '')}:quarantine_size_mb=1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True, env=environment)
    figures: dict[str, float] = json.loads(done.stdout)
    assert figures["peak_bytes"] <= 1.3 * figures["weights_bytes"] + figures["largest_tensor_bytes"]
    return figures


@pytest.mark.parametrize(("fixture", "weights_format"), [(SMOLLM2, "bf16"), (SMOLLM2, "fp32"), (GEMMA3, "bf16")])
def test_the_first_and_later_loads_take_little_more_memory_than_the_weights(
    gguf: Path, weights_format: str, shared_cache: None
) -> None:
    measured_load(gguf, weights_format)
    measured_load(gguf, weights_format)


def test_a_later_load_converts_nothing(smollm2_gguf: Path, shared_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is what makes it quick: the weights are mapped."""
    load(smollm2_gguf, "bf16")

    def conversion(*_: object) -> None:
        raise AssertionError("the file was converted again")

    monkeypatch.setattr("kvist.loading.gguf_conversion.convert_gguf", conversion)
    monkeypatch.setattr("kvist.loading.gguf_blocks.dequantise", conversion)
    assert load(smollm2_gguf, "bf16").weights_bytes > 0


def test_a_directory_in_another_dtype_is_converted_as_leanly(smollm2_gguf: Path, shared_cache: None) -> None:
    measured_load(prepared_copy(smollm2_gguf, "fp32", no_progress), "bf16")


@pytest.mark.parametrize("fixture", [SMOLLM2, GEMMA3])
def test_the_prepared_weights_are_the_decoded_ones(gguf: Path, shared_cache: None) -> None:
    file = GgufFile(gguf)
    stored = GgufCheckpoint(file, decoder_config(hf_config(file)))
    copy = SafetensorsCheckpoint(prepared_copy(gguf, "bf16", no_progress))
    assert set(copy.names()) == set(stored.names())
    for name in copy.names()[1::9]:
        assert torch.equal(copy.read(name, torch.bfloat16), stored.read(name, torch.bfloat16))


def test_the_quantised_codes_are_within_reach(smollm2_gguf: Path) -> None:
    file = GgufFile(smollm2_gguf)
    codes = GgufCheckpoint(file, decoder_config(hf_config(file))).codes("model.layers.0.mlp.down_proj.weight")
    assert codes is not None
    assert (codes.ggml_type, codes.shape, tuple(codes.blocks.shape)) == ("Q4_1", (576, 1536), (576, 1536 // 32 * 20))


def test_importing_the_loader_brings_in_nothing_heavy_but_torch() -> None:
    program = "import sys, kvist.loading.loader; print(sorted({'transformers', 'gguf', 'huggingface_hub', 'rich', " \
        "'jinja2'} & sys.modules.keys()))"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout == "[]\n"
