from __future__ import annotations

import pytest

from kvist.bench import memory
from kvist.bench.memory import MemoryFigures, peak_bytes_of, resident_bytes

_SIZE = 64 << 20


def test_the_peak_is_that_of_the_task() -> None:
    before = resident_bytes()
    assert peak_bytes_of(lambda: bytearray(b"x" * _SIZE)) >= before + _SIZE


@pytest.mark.skipif(not memory._RESET.exists(), reason="this system cannot begin anew to watch the peak")
def test_an_earlier_peak_does_not_count() -> None:
    high = peak_bytes_of(lambda: bytearray(b"x" * _SIZE))
    assert peak_bytes_of(lambda: None) < high


def test_a_system_without_linux_files_tells_its_own_peak(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "none")
    monkeypatch.setattr(memory, "_RESET", tmp_path / "no" / "folder")
    assert peak_bytes_of(lambda: None) >= _SIZE


def test_what_is_predicted_is_the_sum() -> None:
    assert MemoryFigures("int8", 1, 20, 300, 5000).predicted_bytes == 321
