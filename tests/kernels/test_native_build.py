"""No code compiled for a newer CPU is where an older one would run it."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from kvist.kernels import native

# Wide registers, mask registers, and mnemonics of VEX and EVEX, which begin with v: older CPUs fault on all of them.
NEWER = re.compile(r"%[yz]mm\d|%k[0-7]\b|\tv[a-z]\w+\s|\t(?:shlx|shrx|sarx|mulx|rorx|pdep|pext|andn|bextr)\w?\s")
OF_ISA = re.compile(r"\bkvist::(avx2|avx512|baseline)::")


@pytest.fixture(scope="module")
def functions() -> dict[str, list[str]]:
    """The instructions of each function in the native library, by its demangled name."""
    if shutil.which("objdump") is None:
        pytest.skip("needs objdump (binutils)")
    if native._library().built_isas() != ["baseline", "avx2", "avx512"]:
        pytest.skip("needs a build for x86-64 with all instruction sets")
    module = find_spec("kvist.kernels._native")
    assert module is not None
    assert module.origin is not None
    return dict(disassemble(module.origin))


def disassemble(path: str) -> Iterator[tuple[str, list[str]]]:
    listing = subprocess.run(
        ["objdump", "--disassemble", "--demangle", "--no-show-raw-insn", path],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for block in listing.split("\n\n"):
        head, _, body = block.partition("\n")
        name = re.fullmatch(r"[0-9a-f]+ <(.*)>:", head)
        if name:
            yield name[1], body.splitlines()


def test_each_instruction_set_uses_its_registers(functions: dict[str, list[str]]) -> None:
    used = {
        isa: "\n".join(functions[f"kvist::{isa}::sum_words(unsigned long const*, unsigned long)"])
        for isa in ("baseline", "avx2", "avx512")
    }
    assert "%zmm" in used["avx512"]
    assert "%ymm" in used["avx2"]
    assert "%zmm" not in used["avx2"]
    assert "%xmm" in used["baseline"]


def test_only_the_avx_kernels_hold_avx_instructions(functions: dict[str, list[str]]) -> None:
    offenders = []
    for name, instructions in functions.items():
        isa = OF_ISA.search(name)
        if isa is not None and isa[1] != "baseline":
            continue
        offenders += [f"{name}: {line.strip()}" for line in instructions if NEWER.search(line)]
    assert len(functions) > 100
    assert offenders == []
