"""The native library: its operations against their plain twins, its border, its place beside PyTorch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvist.errors import NativeError, OptionError
from kvist.kernels import native
from kvist.kernels.caches import last_level_cache_bytes

# Words behind a whole number of kilobytes, around every boundary: of a vector (2 to 8 words), of a loop's step (16 to
# 64), of a thread's cache line.
SPARE_WORDS = (0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127)
LEAST_BUFFER = 2**16
SMALL_BUFFER = 2**20


def run_python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != native.MAX_ISA_VARIABLE} | variables
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
@pytest.mark.parametrize("isa", native.available_isas())
def test_a_buffer_of_any_size_is_read_whole(isa: str, num_threads: int) -> None:
    """The probe adds up what it reads, and raises where the sum is not that of what it wrote."""
    library = native._library()
    library.choose_isa(isa)
    try:
        for words in SPARE_WORDS:
            assert min(library.read_rates(LEAST_BUFFER + 8 * words, 2, num_threads)) > 0, words
    finally:
        library.choose_isa(os.environ.get(native.MAX_ISA_VARIABLE, ""))


def test_rates_are_those_that_memory_can_have() -> None:
    rates = native.read_rates(passes=2)
    assert len(rates) == 2
    assert 1e8 < max(rates) < 1e13


def test_many_passes_can_be_interrupted() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            native._library().read_rates(SMALL_BUFFER, 1_000_000, 2)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_the_probe_reads_with_the_threads_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []

    class Library:
        def read_rates(self, buffer_bytes: int, passes: int, num_threads: int) -> list[float]:
            told.append((buffer_bytes, passes, num_threads))
            return [1e9, 3e9, 2e9]

    monkeypatch.setattr(native, "_library", Library)
    monkeypatch.setattr(native, "last_level_cache_bytes", lambda: 70 * 2**20)
    assert native.read_rates(num_threads=3) == (1e9, 3e9, 2e9)
    assert native.read_rates(buffer_bytes=257 * 2**20, passes=1) == (1e9, 3e9, 2e9)
    assert told == [(280 * 2**20, 5, 3), (257 * 2**20, 1, torch.get_num_threads())]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"buffer_bytes": 2**28 - 1}, "buffer_bytes is 268435455: it must be from "),
        ({"buffer_bytes": -1}, "buffer_bytes is -1: it must be from "),
        ({"buffer_bytes": 2**60}, "half of the free memory"),
        ({"passes": -1}, "passes is -1: it must be from 1 to "),
        ({"num_threads": -2}, "num_threads is -2: it must be from 1 to 1024"),
        ({"num_threads": 0}, "num_threads is 0: it must be from 1 to 1024"),
        ({"num_threads": 1025}, "num_threads is 1025: it must be from 1 to 1024"),
    ],
)
def test_the_probe_refuses(options: dict[str, int], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        native.read_rates(**options)


def test_a_buffer_within_the_caches_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "last_level_cache_bytes", lambda: 2**28)
    with pytest.raises(OptionError, match="it must be from 268435457, more than the caches hold"):
        native.read_rates(buffer_bytes=2**28)


def test_the_library_holds_the_same_border() -> None:
    library = native._library()
    for arguments, name in (
        ((100, 1, 1), "buffer_bytes"),
        ((SMALL_BUFFER, 0, 1), "passes"),
        ((SMALL_BUFFER, 1, 0), "num_threads"),
    ):
        with pytest.raises(ValueError, match=f"{name} is"):
            library.read_rates(*arguments)


# --- instruction sets -------------------------------------------------------------------------------------------------

READS = f"""
from kvist.kernels import native
print(native.isa())
assert min(native._library().read_rates({SMALL_BUFFER}, 3, 2)) > 0
"""


@pytest.mark.parametrize("isa", native.available_isas())
def test_a_cap_is_honoured(isa: str) -> None:
    result = run_python(READS, KVIST_MAX_ISA=isa)
    assert (result.stdout.strip(), result.stderr, result.returncode) == (isa, "", 0)


def test_without_a_cap_the_richest_instruction_set_runs() -> None:
    result = run_python("from kvist.kernels import native; print(native.isa())")
    assert result.stdout.strip() == native.available_isas()[-1]


def test_an_unknown_cap_names_the_known_ones() -> None:
    code = (
        "from kvist.kernels import native\nfrom kvist.errors import NativeError\n"
        "try:\n    native.isa()\nexcept NativeError as error:\n    print(error)"
    )
    message = run_python(code, KVIST_MAX_ISA="avx9").stdout.strip()
    built = ", ".join(native._library().built_isas())
    assert message == f"KVIST_MAX_ISA is 'avx9': this build has {built}; set it to one of these or leave it unset"


def test_the_cpu_is_asked_rightly() -> None:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists() or "baseline" not in native._library().built_isas():
        pytest.skip("needs /proc/cpuinfo of an x86-64 machine")
    flags = set(next(line for line in cpuinfo.read_text().splitlines() if line.startswith("flags")).split())
    needs = {
        "baseline": {"sse4_2", "popcnt", "cx16", "lahf_lm"},
        "avx2": {"avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"},
        "avx512": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni"},
    }
    runs, expected = set(), []
    for isa, needed in needs.items():
        runs |= needed
        if isa in native._library().built_isas() and runs <= flags:
            expected.append(isa)
    assert native.available_isas() == tuple(expected)


# --- beside PyTorch, and without the library --------------------------------------------------------------------------


def test_one_openmp_runtime_serves_pytorch_and_the_library() -> None:
    if not Path("/proc/self/maps").exists():
        pytest.skip("needs /proc/self/maps")
    code = (
        "import re\nfrom pathlib import Path\nfrom kvist.kernels import native\nimport torch\n"
        f"native._library().read_rates({SMALL_BUFFER}, 1, 2)\n"
        "torch.rand(1000, 1000).sum()\n"
        "print(*set(re.findall(r'/\\S*lib(?:gomp|omp|iomp)\\S*', Path('/proc/self/maps').read_text())), sep='\\n')"
    )
    runtimes = run_python(code).stdout.split()
    assert len(runtimes) == 1, runtimes
    assert "torch" in runtimes[0]


def test_a_missing_library_is_missed_only_when_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    native._library.cache_clear()
    monkeypatch.setitem(sys.modules, "kvist.kernels._native", None)
    try:
        with pytest.raises(NativeError, match=r"cannot be loaded .* build it with 'pip install \.'"):
            native.isa()
    finally:
        native._library.cache_clear()


# --- caches -----------------------------------------------------------------------------------------------------------


def describe_cache(root: Path, cpu: int, level: int, size: str, sharers: str) -> None:
    index = root / f"cpu{cpu}" / "cache" / f"index{level}"
    index.mkdir(parents=True)
    for name, value in (("level", str(level)), ("size", size), ("shared_cpu_list", sharers)):
        (index / name).write_text(value + "\n")


def test_each_last_level_cache_is_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvist.kernels.caches._usable_cpus", lambda: [0, 1, 2])
    for cpu, sharers in ((0, "0-1"), (1, "0-1"), (2, "2-3"), (3, "2-3"), (4, "4-5")):
        describe_cache(tmp_path, cpu, 2, "1M", str(cpu))
        describe_cache(tmp_path, cpu, 3, "32768K", sharers)
    assert last_level_cache_bytes(tmp_path) == 2 * 32 * 2**20


def test_a_system_that_describes_no_caches(tmp_path: Path) -> None:
    assert last_level_cache_bytes(tmp_path) is None
