"""Threads wait briefly, unless the environment says how, and never too late to matter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

LOADED = "; import os; print(os.environ.get('GOMP_SPINCOUNT'))"


def spin_count(code: str, **environment: str) -> str:
    unset = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    result = subprocess.run(
        [sys.executable, "-c", code + LOADED], env={**unset, **environment}, capture_output=True, text=True, check=True
    )
    return result.stdout.strip()


@pytest.mark.parametrize("code", ["from kvist import LLM", "from kvist.kernels import native; native.isa()"])
def test_it_is_set_before_pytorch_is_loaded(code: str) -> None:
    assert spin_count(code) == "10000"


def test_what_the_environment_says_is_kept() -> None:
    assert spin_count("from kvist import LLM", GOMP_SPINCOUNT="7") == "7"
    assert spin_count("from kvist import LLM", OMP_WAIT_POLICY="active") == "None"


def test_importing_kvist_sets_nothing() -> None:
    assert spin_count("import kvist") == "None"
    assert spin_count("import torch; from kvist import LLM") == "None", "too late to have an effect"
