"""How threads wait for each other. Imports nothing of PyTorch, so that it can run before that is loaded."""

from __future__ import annotations

import os
import sys

# Turns of a loop of some nanoseconds each: as long as a thread with a core of its own is late. libgomp's default is 30
# times as long.
_SPINS = "10000"


def wait_briefly() -> None:
    """Let OpenMP's threads spin for tens of microseconds before they sleep, unless the environment says how.

    A model has hundreds of parallel operations per token, and at the end of each the threads wait for the slowest. By
    default libgomp's spin for milliseconds; beside any other busy program they then keep from the core the very thread
    that they wait for, and decoding becomes ten times slower. libgomp reads its settings when PyTorch loads it: call
    this before.
    """
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
