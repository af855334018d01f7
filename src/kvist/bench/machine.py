"""What a measurement was taken on."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kvist.errors import NativeError
from kvist.kernels import native
from kvist.kernels.caches import last_level_cache_bytes


@dataclass(frozen=True)
class MachineFacts:
    """The facts that every benchmark prints beside its figures.

    Attributes:
        cpu: the processor's name.
        architecture: as the operating system names it, e.g. `x86_64`.
        isa: the instruction set that the native kernels run; None without the native library.
        threads: how many threads the measurement used.
        cpus: how many CPUs this process may use.
        last_level_cache_bytes: of all caches that these CPUs reach; None where the system does not say.
        memory_bytes: of the whole machine.
        system: the operating system and its release.
        python, torch, kvist: versions.
    """

    cpu: str
    architecture: str
    isa: str | None
    threads: int
    cpus: int
    last_level_cache_bytes: int | None
    memory_bytes: int
    system: str
    python: str
    torch: str
    kvist: str

    @property
    def line(self) -> str:
        """What figures rest on, in a line."""
        return (
            f"{self.cpu}, {self.isa or 'no native kernels'}, {self.threads} threads on {self.cpus} CPUs; "
            f"kvist {self.kvist}, torch {self.torch}"
        )

    @classmethod
    def gather(cls, threads: int) -> MachineFacts:
        """The facts of this machine, for a measurement that uses `threads` threads."""
        import psutil

        return cls(
            cpu=_cpu_name(),
            architecture=platform.machine(),
            isa=_isa(),
            threads=threads,
            cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            last_level_cache_bytes=last_level_cache_bytes(),
            memory_bytes=int(psutil.virtual_memory().total),
            system=f"{platform.system()} {platform.release()}",
            python=platform.python_version(),
            torch=_version("torch"),
            kvist=_version("kvist"),
        )


def _cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    try:
        for line in cpuinfo.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return " ".join(value.split())
    except OSError:
        pass
    return platform.processor() or "unknown"


def _isa() -> str | None:
    try:
        return native.isa()
    except NativeError:
        return None


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"
