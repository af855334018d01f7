"""What may still be taken is what the machine has and what every limit around the process leaves."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from kvist.memory import available_bytes

V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
GIB = 2**30


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 64 GiB to spare."""
    memory = type("Memory", (), {"available": 64 * GIB})
    monkeypatch.setattr(psutil, "virtual_memory", memory)


def group(folder: Path, names: tuple[str, str, str], limit: str, used: int, cached: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 7\n{names[2]} {cached}\nfile 99\n")


def available(tmp_path: Path, membership: str) -> int:
    (tmp_path / "membership").write_text(membership)
    return available_bytes(tmp_path / "membership", tmp_path)


def test_without_limits_it_is_what_the_machine_has(tmp_path: Path) -> None:
    assert available_bytes(tmp_path / "missing", tmp_path) == 64 * GIB
    assert available(tmp_path, "0::/\n") == 64 * GIB
    group(tmp_path, V2, "max", 5)
    assert available(tmp_path, "0::/\n") == 64 * GIB


def test_a_container_sees_its_limit_at_the_root(tmp_path: Path) -> None:
    group(tmp_path, V2, str(8 * GIB), 3 * GIB)
    assert available(tmp_path, "0::/\n") == 5 * GIB
    assert available(tmp_path, "0::/docker/0123abc\n") == 5 * GIB  # the path as it is outside


def test_the_tightest_limit_on_the_way_down_holds(tmp_path: Path) -> None:
    group(tmp_path / "user.slice", V2, str(8 * GIB), 7 * GIB)
    group(tmp_path / "user.slice/job", V2, str(4 * GIB), 1 * GIB)
    group(tmp_path / "user.slice/another", V2, "5", 5)
    assert available(tmp_path, "0::/user.slice/job\n") == 1 * GIB
    group(tmp_path / "user.slice", V2, "max", 7 * GIB)
    assert available(tmp_path, "0::/user.slice/job\n") == 3 * GIB


def test_version_1_has_other_names(tmp_path: Path) -> None:
    membership = "9:name=systemd:/\n5:devices:/\n4:cpu,memory:/job\n0::/\n"
    group(tmp_path / "memory", V1, "9223372036854771712", 50 * GIB)
    assert available(tmp_path, membership) == 64 * GIB
    group(tmp_path / "memory/job", V1, str(6 * GIB), 2 * GIB)
    assert available(tmp_path, membership) == 4 * GIB


@pytest.mark.parametrize(("names", "membership", "root"), [(V2, "0::/\n", "."), (V1, "4:memory:/\n", "memory")])
def test_read_files_that_may_be_forgotten_are_room(
    tmp_path: Path, names: tuple[str, str, str], membership: str, root: str
) -> None:
    group(tmp_path / root, names, str(8 * GIB), 8 * GIB, cached=3 * GIB)
    assert available(tmp_path, membership) == 3 * GIB


def test_a_group_that_is_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    group(tmp_path, V2, str(GIB), 2 * GIB)
    assert available(tmp_path, "0::/\n") == 0
