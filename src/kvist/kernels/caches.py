"""How much the processor's caches hold."""

from __future__ import annotations

import os
from pathlib import Path

_SYSFS_CPUS = Path("/sys/devices/system/cpu")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def last_level_cache_bytes(root: Path = _SYSFS_CPUS) -> int | None:
    """Bytes of the last-level caches that this process's CPUs reach, each shared one counted once.

    None where the system does not say; on Linux it stands under `root`.
    """
    sizes: dict[tuple[int, str], int] = {}
    for cpu in _usable_cpus():
        for index in root.glob(f"cpu{cpu}/cache/index*"):
            try:
                level, size, sharers = (
                    (index / name).read_text().strip() for name in ("level", "size", "shared_cpu_list")
                )
                sizes[int(level), sharers] = _size(size)
            except (OSError, ValueError):
                continue
    if not sizes:
        return None
    last_level = max(level for level, _ in sizes)
    return sum(size for (level, _), size in sizes.items() if level == last_level)


def _usable_cpus() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _size(text: str) -> int:
    unit = _UNITS.get(text[-1:], 1)
    return int(text.rstrip("KMG")) * unit
