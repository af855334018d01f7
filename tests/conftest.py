"""What all tests share: the real models, where they have been pulled."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvist.loading.demo_models import DEMO_MODELS
from kvist.threads import wait_briefly

wait_briefly()  # before any test module loads PyTorch


def _pulled(name: str) -> Path:
    model = DEMO_MODELS[name]
    if not model.is_pulled:
        pytest.skip(f"{name} is not in the cache folder: run `kvist pull {name}` to test the real model")
    return model.path


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The file of SmolLM2-135M-Instruct."""
    return _pulled("smollm2-135m")


@pytest.fixture(scope="session")
def gemma3_gguf() -> Path:
    """The file of Gemma 3 270M."""
    return _pulled("gemma3-270m")


@pytest.fixture(scope="session")
def alice() -> str:
    """Alice's Adventures in Wonderland."""
    return (Path(__file__).parent / "data" / "alice.txt").read_text(encoding="utf-8")
