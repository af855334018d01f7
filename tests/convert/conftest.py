"""Tiny checkpoints of every family to convert, with a tokenizer, and a text to look at them on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from convert_fakes import write_checkpoint


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVIST_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Writes a tiny random checkpoint: 8 query heads, 4 KV heads."""

    def written(
        family: str = "llama", *, dtype: torch.dtype = torch.float32, num_shards: int = 1, **fields: object
    ) -> Path:
        return write_checkpoint(tmp_path / "source", family, dtype=dtype, num_shards=num_shards, **fields)

    return written


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{number} twigs on branch {number * 7919 % 1000}, " for number in range(300)))
    return path
