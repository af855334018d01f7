"""The memory that native calls work in is lent: it belongs to no thread, and does not grow with their number."""

from __future__ import annotations

import threading

import psutil
import torch

from kvist.kernels import native
from kvist.kernels.weight_codec import pack, quantise

ROWS, COLUMNS = 2048, 4096


def test_threads_that_call_one_after_another_work_in_the_same_memory() -> None:
    generator = torch.Generator().manual_seed(0)
    handle = native.linear_weight(pack(quantise(torch.randn(64, COLUMNS, generator=generator), "int8")))
    x, out = torch.randn(ROWS, COLUMNS, generator=generator), torch.empty(ROWS, 64)
    wait, done = threading.Event(), threading.Semaphore(0)

    def call() -> None:
        handle.apply(x, out, num_threads=1)
        done.release()
        wait.wait()

    call_alone = threading.Thread(target=call)
    call_alone.start()
    done.acquire()
    before = psutil.Process().memory_info().rss
    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
        done.acquire()  # the next begins when this one is through, and none ends
    grown = psutil.Process().memory_info().rss - before
    wait.set()
    for thread in [call_alone, *threads]:
        thread.join()
    # Each would keep 1 MiB of quantised rows and more.
    assert grown < 4 << 20, f"{grown:,} bytes"
