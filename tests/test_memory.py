"""What may still be taken is what the machine has and what every limit around the process leaves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import psutil
import pytest

from kvist.errors import OptionError
from kvist.memory import MemoryBudget, available_bytes, binary_size, distinct_sizes

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


def test_the_lower_of_two_limits_holds(tmp_path: Path) -> None:
    group(tmp_path, V2, str(8 * GIB), 1 * GIB)
    for high, left in (("max", 7 * GIB), (str(3 * GIB), 2 * GIB), (str(9 * GIB), 7 * GIB)):
        (tmp_path / "memory.high").write_text(f"{high}\n")
        assert available(tmp_path, "0::/\n") == left
    (tmp_path / "memory.max").write_text("max\n")
    assert available(tmp_path, "0::/\n") == 8 * GIB  # memory.high alone


@pytest.mark.parametrize(
    "statistics", [None, "", "nonsense\n", "inactive_file many\n", "inactive_file\n", "\u00e4 7\n"]
)
def test_a_limit_holds_whatever_the_statistics_say(tmp_path: Path, statistics: str | None) -> None:
    group(tmp_path, V2, str(8 * GIB), 3 * GIB, cached=GIB)
    (tmp_path / "memory.stat").unlink()
    if statistics is not None:
        (tmp_path / "memory.stat").write_text(statistics, encoding="utf-8")
    assert available(tmp_path, "0::/\n") == 5 * GIB


def test_a_limit_without_what_is_used_says_nothing(tmp_path: Path) -> None:
    group(tmp_path, V2, str(8 * GIB), 3 * GIB)
    (tmp_path / "memory.current").unlink()
    assert available(tmp_path, "0::/\n") == 64 * GIB


def test_a_line_that_names_no_group_is_passed_over(tmp_path: Path) -> None:
    group(tmp_path, V2, str(8 * GIB), 3 * GIB)
    assert available(tmp_path, "\nnonsense\n0:\n0::/\n") == 5 * GIB
    (tmp_path / "odd").write_bytes(b"1:\xff:/\xff\n0::/\n")
    assert available_bytes(tmp_path / "odd", tmp_path) == 5 * GIB
    assert available(tmp_path, "nonsense\n") == 64 * GIB


def test_a_group_that_is_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    group(tmp_path, V2, str(GIB), 2 * GIB)
    assert available(tmp_path, "0::/\n") == 0


# --- what a user says -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MiB", 512 * 2**20),
        ("2GB", 2 * 10**9),
        ("1.5 KiB", 1536),
        ("7", 7),
        (4096, 4096),
        ("1TiB", 2**40),
        ("1TB", 10**12),
        ("1.5t", 1_500_000_000_000),
    ],
)
def test_sizes_are_read(text: str | int, size: int) -> None:
    assert MemoryBudget.parse(text) == MemoryBudget(num_bytes=size)
    assert MemoryBudget.parse(text).resolve() == size


@pytest.mark.parametrize(
    ("given", "size"), [(None, 500), ("50%", 500), ("12.5 %", 125), (0.25, 250), (1.0, 1000), ("100%", 1000), (1e-9, 1)]
)
def test_shares_are_of_what_is_free_when_it_is_asked_for(given: str | float | None, size: int) -> None:
    assert MemoryBudget.parse(given).resolve(lambda: 1000) == size


@pytest.mark.parametrize(
    "given",
    [
        *("", "-1", "0", "1 parsec", "MiB", "1e9", "nan", "0.1", "0%", "101%", "%", "50%%", "9" * 400, "9e99TiB", "٣"),
        *(True, -5, 0, 0.0, 1.5, -0.5, float("nan"), float("inf"), 10**400, 10**5000, b"1", [1]),
    ],
    ids=lambda given: f"{type(given).__name__} {str(given)[:9] if not isinstance(given, int) else given % 1000}",
)
def test_what_is_no_size_is_refused(given: str) -> None:
    with pytest.raises(OptionError, match="is not a size in bytes") as caught:
        MemoryBudget.parse(given)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("lots", "'lots' is not a size in bytes: write it like 512MiB, or 50% of what is free"),
        ("101%", "'101%' is not a size in bytes: a share is above 0% and at most 100%"),
        ("0.5", "'0.5' is not a size in bytes: it is less than one; write a share like 50%"),
        ("0", "'0' is not a size in bytes: it must be positive, like 512MiB or 50%"),
        (-5, "-5 is not a size in bytes: it must be positive, like 512MiB or 50%"),
        (1.5, "1.5 is not a size in bytes: a float is a share of what is free, above 0 and at most 1"),
        (True, "True is not a size in bytes: write it like 512MiB, or 50% of what is free"),
        ("9e99TiB", "'9e99TiB' is not a size in bytes: write it like 512MiB, or 50% of what is free"),
        ("1" + "0" * 20, f"'1{'0' * 20}' is not a size in bytes that any machine has: write it like 512MiB or 50%"),
    ],
)
def test_what_is_no_size_is_told_why(given: object, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        MemoryBudget.parse(given)  # type: ignore[arg-type]
    assert str(caught.value) == message


# --- what a user is told ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1023, "1,023 bytes"),
        (1024, "1.0 KiB"),
        (3 * 2**19, "1.5 MiB"),
        (GIB, "1.0 GiB"),
        (2**51, "2,048.0 TiB"),
    ],
)
def test_a_size_is_said_in_the_units_that_are_read(num_bytes: int, text: str) -> None:
    assert binary_size(num_bytes) == text


@pytest.mark.parametrize(
    ("one", "other", "texts"),
    [
        (2 * GIB, 3 * GIB, ("2.0 GiB", "3.0 GiB")),
        (GIB, GIB + 1, ("1,073,741,824 bytes", "1,073,741,825 bytes")),
        (GIB, GIB, ("1.0 GiB", "1.0 GiB")),
        (0, 1, ("0 bytes", "1 byte")),
    ],
)
def test_two_sizes_that_differ_are_said_in_other_words(one: int, other: int, texts: tuple[str, str]) -> None:
    assert distinct_sizes(one, other) == texts


def test_numpys_numbers_are_numbers() -> None:
    assert MemoryBudget.parse(np.float32(0.5)) == MemoryBudget(share=0.5)
    assert MemoryBudget.parse(np.int64(4096)) == MemoryBudget(num_bytes=4096)


def test_a_limit_on_the_address_space_is_one_on_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Half of what is left of it, since a range of the whole budget may be reserved twice."""
    monkeypatch.undo()
    used = psutil.Process().memory_info().vms
    monkeypatch.setattr("resource.getrlimit", lambda which: (used + (1 << 21), -1))
    assert available_bytes(tmp_path / "none", tmp_path) <= 1 << 20
