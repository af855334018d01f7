"""How much memory this process may still take."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

_MEMBERSHIP = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")


def available_bytes(membership: Path = _MEMBERSHIP, mount: Path = _MOUNT) -> int:
    """Bytes that can be taken before the machine swaps, or a container's limit ends the process.

    Args:
        membership: the file that names the control groups (cgroups) of this process.
        mount: where their files are.
    """
    return max(0, min([int(psutil.virtual_memory().available), *_group_rooms(membership, mount)]))


def _group_rooms(membership: Path, mount: Path) -> Iterator[int]:
    """What each limit on this process leaves. One holds for a group and all groups below it."""
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _rooms(mount, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _rooms(mount / "memory", path, *names)


def _rooms(root: Path, path: str, limit_name: str, used_name: str, cached_name: str) -> Iterator[int]:
    """The same for one kind of groups, from the root down to the process's own.

    A container often sees its own group as the root, and the path as it is outside: what does not exist is passed over.
    """
    group = root
    for part in ("", *path.split("/")):
        group /= part
        try:
            limit, used = int((group / limit_name).read_text()), int((group / used_name).read_text())
            statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # no limit here, which version 2 says with the word "max"
            continue
        # Files that were read and may be forgotten count as used: a model that was just loaded is among them.
        yield limit - used + int(statistics.get(cached_name, 0))
