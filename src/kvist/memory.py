"""How much memory the cache may take: as users say it, what the machine has, and how a size is said to them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from kvist.checks import in_words, is_integer, is_number
from kvist.errors import OptionError

_BYTE_UNITS = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "t": 10**12, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip

# What 64 bits can count.
_MOST_BYTES = 2**63 - 1

_MEMBERSHIP = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class MemoryBudget:
    """A bound on the memory of keys and values: so many bytes, or a share of what is free when it is asked for.

    Args:
        num_bytes: the bytes; None where it is a share.
        share: above 0, at most 1; None where it is in bytes.
    """

    num_bytes: int | None = None
    share: float | None = None

    @classmethod
    def parse(cls, given: str | int | float | None) -> MemoryBudget:
        """The budget that a user names: bytes as a number or like `"512MiB"`, a share as a fraction or like `"50%"`.

        None is half of what is free.

        Raises:
            OptionError: it is none of these.
        """
        if given is None:
            return cls(share=0.5)
        if is_integer(given):
            return cls(num_bytes=_checked(given, min(int(given), _MOST_BYTES + 1)))
        if is_number(given):
            if 0 < float(given) <= 1:
                return cls(share=float(given))
            raise _no_size(given, ": a float is a share of what is free, above 0 and at most 1")
        if isinstance(given, str):
            number, unit = _split(given)
            if unit == "%":
                if 0 < number <= 100:
                    return cls(share=number / 100)
                raise _no_size(given, ": a share is above 0% and at most 100%")
            if unit in _BYTE_UNITS:
                return cls(num_bytes=_checked(given, number * _BYTE_UNITS[unit]))
        raise _no_size(given)

    def resolve(self, available: Callable[[], int] | None = None) -> int:
        """The bytes of the budget, one at least; a share is of what `available` says."""
        if self.num_bytes is not None:
            return self.num_bytes
        return max(1, int((self.share or 0.0) * (available or available_bytes)()))


def _split(text: str) -> tuple[float, str]:
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z%]*)\s*", text.lower(), re.ASCII)
    if match is None:
        raise _no_size(text)
    return float(match[1]), match[2]  # infinite where it overflows


def _checked(given: object, size: float) -> int:
    if 0 < size < 1:
        raise _no_size(given, ": it is less than one; write a share like 50%")
    if size < 1:
        raise _no_size(given, ": it must be positive, like 512MiB or 50%")
    if size > _MOST_BYTES:
        raise _no_size(given, " that any machine has: write it like 512MiB or 50%")
    return int(size)


def _no_size(given: object, why: str = ": write it like 512MiB, or 50% of what is free") -> OptionError:
    return OptionError(f"{in_words(given)} is not a size in bytes{why}")


def binary_size(num_bytes: int) -> str:
    """A size for a person, in the units that `kv_memory` takes: `640 bytes`, `1.5 MiB`, `2,048.0 TiB`."""
    if num_bytes < 1024:
        return _in_bytes(num_bytes)
    size, unit = num_bytes / 1024, "KiB"
    for larger in ("MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:,.1f} {unit}"


def distinct_sizes(one: int, other: int) -> tuple[str, str]:
    """Two sizes for a person to compare: as `binary_size` says them, in bytes where it says two in the same words."""
    texts = binary_size(one), binary_size(other)
    return texts if one == other or texts[0] != texts[1] else (_in_bytes(one), _in_bytes(other))


def _in_bytes(num_bytes: int) -> str:
    return f"{num_bytes:,} byte{'s' * (num_bytes != 1)}"


def available_bytes(membership: Path = _MEMBERSHIP, mount: Path = _MOUNT) -> int:
    """Bytes that can be taken before the machine swaps, or a container's limit ends the process.

    Args:
        membership: the file that names the control groups (cgroups) of this process.
        mount: where their files are.
    """
    rooms = [int(psutil.virtual_memory().available), *_group_rooms(membership, mount), *_address_room()]
    return max(0, min(rooms))


def _address_room() -> Iterator[int]:
    """What a limit on this process's address space leaves (`ulimit -v`). Pages are reserved there before they are used.

    Half of it: each of the few pools of a cache reserves a range of the whole budget's size.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        yield (limit - int(psutil.Process().memory_info().vms)) // 2


@dataclass(frozen=True)
class _GroupFiles:
    """What the files of a control group are called.

    Attributes:
        limits: of its memory; the lowest holds. Above `memory.high` the system takes memory back and slows down.
        used: how much it has.
        cached: in its statistics, what it could forget.
    """

    limits: tuple[str, ...]
    used: str
    cached: str


_VERSION_1 = _GroupFiles(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = _GroupFiles(("memory.max", "memory.high"), "memory.current", "inactive_file")


def _group_rooms(membership: Path, mount: Path) -> Iterator[int]:
    """What each limit on this process leaves. One holds for a group and all groups below it."""
    try:
        lines = membership.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, *fields = line.split(":", 2)
        if len(fields) != 2:  # not a line as the kernel writes it
            continue
        controllers, path = fields
        if controllers == "":
            yield from _rooms(mount, path, _VERSION_2)
        elif "memory" in controllers.split(","):
            yield from _rooms(mount / "memory", path, _VERSION_1)


def _rooms(root: Path, path: str, names: _GroupFiles) -> Iterator[int]:
    """The same for one kind of groups, from the root down to the process's own.

    A container often sees its own group as the root, and the path as it is outside: what does not exist is passed over.
    """
    group = root
    for part in ("", *path.split("/")):
        group /= part
        limits = [limit for name in names.limits if (limit := _number(group / name)) is not None]
        used = _number(group / names.used)
        if limits and used is not None:
            # Files that were read and may be forgotten count as used: a model that was just loaded is among them.
            yield min(limits) - used + _statistic(group / "memory.stat", names.cached)


def _number(path: Path) -> int | None:
    """The number in a group's file; None where there is none: version 2 has the word "max" for no limit."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _statistic(path: Path, name: str) -> int:
    """A number of a group's statistics; 0 where they do not have it, so that a limit is known without it."""
    try:
        return int(dict(line.split() for line in path.read_text(encoding="ascii").splitlines())[name])
    except (OSError, ValueError, KeyError):
        return 0
