"""The read bandwidth of this machine: the roof over every figure of a decoder, which mostly reads."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from kvist.kernels import native


@dataclass(frozen=True)
class ReadBandwidth:
    """What several passes over the same buffer found.

    Attributes:
        bytes_per_s: each pass's figure, in the order in which they were taken.
        threads: how many threads read.
    """

    bytes_per_s: tuple[float, ...]
    threads: int

    @property
    def best_bytes_per_s(self) -> float:
        return max(self.bytes_per_s)

    @property
    def median_bytes_per_s(self) -> float:
        return statistics.median(self.bytes_per_s)

    @property
    def spread_fraction(self) -> float:
        """How far the passes lie apart, as a fraction of the median: on a shared machine the bandwidth itself moves."""
        return (max(self.bytes_per_s) - min(self.bytes_per_s)) / self.median_bytes_per_s


def measure(*, threads: int | None = None, passes: int = 10, buffer_bytes: int | None = None) -> ReadBandwidth:
    """Read a buffer larger than the caches `passes` times.

    Args:
        threads: how many threads read; PyTorch's number by default.
        passes, buffer_bytes: as in `kernels.native.read_rates`.
    """
    if threads is None:
        import torch

        threads = torch.get_num_threads()
    return ReadBandwidth(native.read_rates(buffer_bytes=buffer_bytes, passes=passes, num_threads=threads), threads)
