"""The memory that native calls work in is lent: it belongs to no thread, and does not grow with their number."""

from __future__ import annotations

import ctypes
import threading
from functools import partial

import psutil
import pytest
import torch
from test_native_layer import DIM, EMBED, HEADS, layer, pages

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


class Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks")),
        *((name, ctypes.c_size_t) for name in ("uordblks", "fordblks", "keepcost")),
    ]


def allocated_bytes() -> int:
    """What is allocated and not yet freed, whatever of it the system still has to give to the process."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        pytest.skip("needs mallinfo2 of glibc 2.33")
    mallinfo.restype = Mallinfo
    info = mallinfo()
    return int(info.uordblks + info.hblkhd)


def test_calls_that_ran_at_once_leave_little() -> None:
    """Each works in 8 MiB of its own while all run, and two of these stay for later calls."""
    at_once, piece_bytes, page_bytes = 8, 8 << 20, 1 << 14
    num_tokens = piece_bytes // (4 * 3 * HEADS * DIM)
    num_pages = num_tokens // 64 + 1
    tables = torch.ones(num_tokens, 1, DIM), torch.zeros(num_tokens, 1, DIM)
    step_of = partial(
        native.page_step, page_bytes=page_bytes, num_tokens=[num_tokens], first_positions=[0], first_numbers=[0],
        page_tables=[torch.arange(num_pages)], window=64,
    )  # fmt: skip
    pools = [torch.zeros(num_pages, page_bytes, dtype=torch.uint8) for _ in range(at_once)]
    rows = [native.hidden_rows(torch.ones(num_tokens, EMBED), tables) for _ in range(at_once)]
    calls = [(layer(), step_of(pool), pages(), rows_of) for pool, rows_of in zip(pools, rows, strict=True)]
    start = threading.Barrier(at_once)
    before = allocated_bytes()

    def call(index: int) -> None:
        start.wait()
        native.run_layers([calls[index]], num_threads=1)

    threads = [threading.Thread(target=call, args=(index,)) for index in range(at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kept = allocated_bytes() - before
    assert kept < 3 * piece_bytes, f"{kept:,} bytes"
