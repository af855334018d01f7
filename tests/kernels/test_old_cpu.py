"""The baseline kernels on an emulated CPU that knows no AVX: whatever else is linked in, it must not run there."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys

import pytest
from test_native_attention import EVERY_FORMAT

from kvist.kernels import native

# The first generation that has all of x86-64-v2.
OLD_CPU = "Nehalem"

# MKL picks its kernels at its first call, and takes those of a newer CPU now and then where two threads call at once.
FIRST_ON_ONE_THREAD = "import torch; torch.zeros(1).exp()"


def test_every_format_is_attended_over() -> None:
    emulator = shutil.which("qemu-x86_64")
    if emulator is None or platform.machine() != "x86_64":
        pytest.skip("needs qemu-x86_64 (Debian: qemu-user) on an x86-64 machine")
    if "libasan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("AddressSanitizer does not run under the emulator")
    environment = {name: value for name, value in os.environ.items() if name != native.MAX_ISA_VARIABLE}
    command = [emulator, "-cpu", OLD_CPU, sys.executable, "-c", f"{FIRST_ON_ONE_THREAD}\n{EVERY_FORMAT}"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    least = native.available_isas()[0]
    # The emulator has notes of its own on standard error.
    assert (result.stdout.strip(), result.returncode) == (least, 0), result.stderr
