"""What `kvist.convert` hands on, and that it waits for nothing heavy."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kvist.convert


@pytest.mark.parametrize("name", kvist.convert.__all__)
def test_each_name_is_there(name: str) -> None:
    assert getattr(kvist.convert, name).__name__ == name


def test_an_unknown_name_is_said_to_be_unknown() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'to_mla'"):
        _ = kvist.convert.to_mla


def test_options_can_be_made_without_pytorch() -> None:
    code = (
        "import sys, kvist.convert as c; c.GqaConfig('mean'); c.UptrainConfig(steps=1);"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
