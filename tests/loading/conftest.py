"""Fixtures of the loading tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own; it does not exist yet."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("KVIST_CACHE", str(folder))
    return folder
