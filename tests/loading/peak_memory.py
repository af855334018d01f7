"""Run as a program: loads a model, touches every weight, and prints what that took as JSON.

    python peak_memory.py MODEL WEIGHTS_FORMAT

Sizes are bytes; peak and resident ones are counted from what the process held before it loaded.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

import torch

from kvist.loading.loader import load


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def peak_bytes() -> int:
    # Of this program alone: ru_maxrss begins with the peak of the process that started it.
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def main(model: str, weights_format: str) -> None:
    before = resident_bytes()
    start, cpu_start = time.perf_counter(), time.process_time()
    loaded = load(model, weights_format)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    sizes = [parameter.nbytes for parameter in loaded.decoder.parameters()]
    for parameter in loaded.decoder.parameters():
        # One byte of every page: mapped weights count only once they are read.
        parameter.data.view(-1).view(torch.uint8)[:: resource.getpagesize()].sum()
    print(
        json.dumps(
            {
                "seconds": seconds,
                "cpu_seconds": cpu_seconds,
                "weights_bytes": loaded.weights_bytes,
                "largest_tensor_bytes": max(sizes),
                "resident_bytes": resident_bytes() - before,
                "peak_bytes": peak_bytes() - before,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
