"""In which dtype a training computes."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch.nn import functional

Autocast = Callable[[], AbstractContextManager[object]]

# A product of this size is timed in both dtypes: 512 rows through a matrix of a small model.
_PROBE_ROWS, _PROBE_COLUMNS, _PROBE_REPETITIONS = 512, 1024, 3


def resolved_compute(compute: str) -> str:
    """`fp32` or `bf16`: for `auto` the faster of both here, by the time of a product."""
    if compute != "auto":
        return compute
    return "bf16" if _product_seconds(torch.bfloat16) < _product_seconds(torch.float32) else "fp32"


def autocast_of(compute: str) -> Autocast:
    """The context in which the forward pass runs."""
    return partial(torch.autocast, "cpu", torch.bfloat16) if compute == "bf16" else nullcontext


def _product_seconds(dtype: torch.dtype) -> float:
    rows = torch.ones(_PROBE_ROWS, _PROBE_COLUMNS, dtype=dtype)
    matrix = torch.ones(_PROBE_COLUMNS, _PROBE_COLUMNS, dtype=dtype)
    functional.linear(rows, matrix)
    found = []
    for _ in range(_PROBE_REPETITIONS):
        began_s = time.perf_counter()
        functional.linear(rows, matrix)
        found.append(time.perf_counter() - began_s)
    return min(found)
