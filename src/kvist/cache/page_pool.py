"""The storage of one layer group: pages, their reference counts and the free ones.

    address range   | p0 | p1 | p2 | p3 | p4 | p5 |  ...  | p max_pages - 1 |    reserved, costs nothing
    committed         ##        ##   ##                                          in use, counted in bytes
    free                   p1             p4   p5    ...                         the lowest is taken first

Every pool has as many pages as the whole budget could pay for, so that any group can have what the others do not use;
who takes pages keeps the sum over all pools within the budget. A page costs memory from `take` until its last owner
gives it back, and is all zeros when it is taken.
"""

from __future__ import annotations

import bisect
import mmap
import platform
import sys
from collections.abc import Sequence
from typing import Protocol

import torch

from kvist.cache.huge_blocks import HugeBlocks
from kvist.errors import CacheFullError
from kvist.memory import binary_size

# So that the system does not count the whole range as memory that it owes. Python has the name from 3.13 on.
_WITH_LINUX_NUMBERS = ("x86_64", "aarch64", "riscv64")
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if platform.machine() in _WITH_LINUX_NUMBERS else 0)

_GROWTH = 1.5
_LEAST_GROWTH_PAGES = 4


def page_stride(page_bytes: int) -> int:
    """The bytes that a page costs: whole pages of the operating system, so that each can be given back."""
    return -(-page_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


class _Storage(Protocol):
    """Memory for the pages of a pool."""

    @property
    def pages(self) -> torch.Tensor:
        """`[P, stride]` uint8."""

    def commit(self, pages: Sequence[int]) -> None:
        """Make pages, none of which is in use, usable and zero."""

    def decommit(self, page: int) -> None:
        """Give the memory of a page back."""


class ReservedRange:
    """An address range of the process: no memory stands behind a page until it is committed. Linux alone has it.

    Args:
        max_pages: how many pages the range has room for.
        stride: bytes from one page to the next, a multiple of the operating system's page size.

    Attributes:
        blocks: what of it lies in huge pages.
    """

    def __init__(self, max_pages: int, stride: int) -> None:
        try:
            self._map = mmap.mmap(-1, max_pages * stride, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        except (OSError, OverflowError) as error:
            raise CacheFullError(
                f"the system grants no address range of {binary_size(max_pages * stride)} for keys and values "
                f"({error}): lower kv_memory, or raise the limit on the process's address space"
            ) from error
        self._stride = stride
        self.blocks = HugeBlocks(self._map, stride)
        # The tensor keeps the map alive; it is unmapped with its last user.
        self.pages = torch.frombuffer(self._map, dtype=torch.uint8).view(max_pages, stride)

    def commit(self, pages: Sequence[int]) -> None:
        try:
            self.blocks.commits(pages)
            # One write per page of the operating system. What the budget counts is committed from here on, not at some
            # later write into the page.
            for page in pages:
                self.pages[page, :: mmap.PAGESIZE] = 0
            self.blocks.committed(pages)
        except BaseException:  # an interrupt
            for page in pages:
                self.decommit(page)
            raise

    def decommit(self, page: int) -> None:
        self.blocks.decommits(page)
        self._map.madvise(mmap.MADV_DONTNEED, page * self._stride, self._stride)


class GrowingTensor:
    """Pages in one tensor that is copied into a larger one when it is full: for other systems and devices.

    What is given back stays with the tensor for the next page.
    """

    def __init__(self, max_pages: int, stride: int, device: torch.device | str) -> None:
        self._max_pages = max_pages
        self.pages = torch.empty((0, stride), dtype=torch.uint8, device=device)

    def commit(self, pages: Sequence[int]) -> None:
        num_pages, stride = self.pages.shape
        needed = max(pages, default=-1) + 1
        if needed > num_pages:
            size = min(self._max_pages, max(needed, int(num_pages * _GROWTH), _LEAST_GROWTH_PAGES))
            # Not one that only inference mode may write to, whatever mode the step runs in.
            with torch.inference_mode(False):
                grown = torch.zeros((size, stride), dtype=torch.uint8, device=self.pages.device)
                grown[:num_pages] = self.pages
            self.pages = grown

    def decommit(self, page: int) -> None:
        self.pages[page] = 0


def _storage(max_pages: int, stride: int, device: torch.device) -> _Storage:
    if device.type == "cpu" and sys.platform == "linux":
        return ReservedRange(max_pages, stride)
    return GrowingTensor(max_pages, stride, device)


class PagePool:
    """The pages of one layer group.

    A page is free, or has as many owners as its reference count says. `take` and `share` make an owner, `give_back`
    ends one.

    Args:
        page_bytes: what a page must hold.
        max_pages: the most that can be in use at once.
        device: where they are.
        storage: their memory; by default what suits the device.

    Attributes:
        stride: bytes that a page in use costs, and from one page to the next.
        max_pages: as given.

    Raises:
        CacheFullError: the system grants no address range of this size.
    """

    def __init__(
        self,
        page_bytes: int,
        max_pages: int,
        device: torch.device | str = "cpu",
        *,
        storage: _Storage | None = None,
    ) -> None:
        self.stride = page_stride(page_bytes)
        self.max_pages = max_pages
        self._storage = storage or _storage(max_pages, self.stride, torch.device(device))
        self._owners: dict[int, int] = {}
        # Free pages: those that were given back, ascending, and all from `_untouched` on. Thus no list of millions.
        self._returned: list[int] = []
        self._untouched = 0

    @property
    def pages(self) -> torch.Tensor:
        """All pages `[P, stride]` uint8. Ask anew after `take`; pages that are not in use must not be touched."""
        return self._storage.pages

    @property
    def pages_in_use(self) -> int:
        return len(self._owners)

    @property
    def bytes_in_use(self) -> int:
        """What the pages in use cost; the budget counts this.

        Linux commits as much for them on the CPU, and no more. A `GrowingTensor` holds what the most pages ever in use
        cost, and up to half as much again, so pools may hold more together than their budget.
        """
        return self.pages_in_use * self.stride

    def owners(self, page: int) -> int:
        """How many own a page; 0 where it is free."""
        return self._owners.get(page, 0)

    def take(self) -> int:
        """The lowest free page, all zeros, with one owner. Raises as `take_together`."""
        return self.take_together(1)[0]

    def take_together(self, count: int) -> list[int]:
        """The lowest free pages, ascending, all zeros, each with one owner: cheaper than one by one.

        Raises:
            CacheFullError: so many are not free; none is taken then. Who keeps to the budget never sees it.
        """
        pages = self._returned[:count]
        num_untouched = count - len(pages)
        if self._untouched + num_untouched > self.max_pages:
            raise CacheFullError(f"all {self.max_pages:,} pages are in use: raise kv_memory")
        pages += range(self._untouched, self._untouched + num_untouched)
        self._storage.commit(pages)
        del self._returned[: count - num_untouched]
        self._untouched += num_untouched
        for page in pages:
            self._owners[page] = 1
        return pages

    def share(self, page: int) -> None:
        """Count one more owner of a page in use."""
        self._check_in_use(page)
        self._owners[page] += 1

    def give_back(self, page: int) -> None:
        """Count one owner less. The last one's leaving makes the page free and gives its memory back."""
        self._check_in_use(page)
        if self._owners[page] > 1:
            self._owners[page] -= 1
            return
        try:
            self._storage.decommit(page)
        finally:  # an interrupt is raised when the system's call is through
            del self._owners[page]
            bisect.insort(self._returned, page)

    def copy(self, source: int, target: int) -> None:
        """Copy the bytes of a page in use to another."""
        self._check_in_use(source)
        self._check_in_use(target)
        self.pages[target].copy_(self.pages[source])

    def _check_in_use(self, page: int) -> None:
        if page not in self._owners:
            raise ValueError(f"page {page} is not in use")
