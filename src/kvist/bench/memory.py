"""How much memory this process has, and the most that it had while something ran."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


@dataclass(frozen=True)
class MemoryFigures:
    """What the memory of a run is made of, and what it came to.

    Attributes:
        name: of the run.
        program_bytes: that the process had before the model was loaded.
        weights_bytes: of all weights.
        kv_bytes: of the pages of all sequences that are open, those of earlier runs included, by the cache's formula.
        peak_bytes: the most that the process had meanwhile.
    """

    name: str
    program_bytes: int
    weights_bytes: int
    kv_bytes: int
    peak_bytes: int

    @property
    def predicted_bytes(self) -> int:
        return self.program_bytes + self.weights_bytes + self.kv_bytes


def resident_bytes() -> int:
    """The memory of this process now."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def live_bytes() -> int:
    """The memory of this process now, less what its allocator has free and can give back to the system.

    The C library of Linux (glibc) alone can be asked to give it back; elsewhere it is `resident_bytes`.
    """
    with suppress(OSError, AttributeError, TypeError):  # TypeError: Windows has no library without a name
        ctypes.CDLL(None).malloc_trim(0)
    return resident_bytes()


def peak_bytes_of(task: Callable[[], object]) -> int:
    """Run a task and return the most memory that this process had meanwhile.

    Linux alone can begin anew to watch: elsewhere it is the most since the process began.
    """
    with suppress(OSError):
        _RESET.write_text(_RESET_PEAK)
    task()
    return _peak_bytes()


def _peak_bytes() -> int:
    with suppress(OSError):
        for line in _STATUS.read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "VmHWM":
                return int(value.split()[0]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
