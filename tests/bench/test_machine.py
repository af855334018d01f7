from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

from kvist.bench import machine
from kvist.bench.machine import MachineFacts
from kvist.errors import NativeError
from kvist.kernels import native


def test_facts_are_those_of_this_machine() -> None:
    facts = MachineFacts.gather(threads=3)
    assert facts.threads == 3
    assert facts.isa == native.isa()
    assert facts.python == platform.python_version()
    assert facts.torch == torch.__version__
    assert facts.architecture == platform.machine()
    assert facts.memory_bytes > 2**28
    assert facts.cpus >= 1
    assert facts.cpu


def test_the_native_library_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise NativeError("the native library cannot be loaded")

    monkeypatch.setattr(native, "isa", missing)
    assert MachineFacts.gather(threads=1).isa is None


def test_the_cpu_has_the_name_that_linux_gives_it(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: A  Fine   CPU @ 3 GHz\nmodel name\t: another\n")
    assert machine._cpu_name(cpuinfo) == "A Fine CPU @ 3 GHz"
    assert machine._cpu_name(tmp_path / "absent")
