"""Blocks of the address range that the operating system maps as one huge page each.

    pages   |    p0    |    p1    |    p2    |    p3    |        of the pool; p3 is free
    blocks  |      b0       |      b1       |     b2    |
                  huge            huge          small

A layer's part of a page is small, and the next lies a whole page further: with small pages of the system, attention
spends time on finding where they are. But a huge page is memory as a whole: a block becomes one when all pool pages
that reach into it are committed, and is one no longer when the first of them is given back. So what the budget counts
stays what the system has committed. Where all of them are committed together it is one from the first touch, which is
cheaper than to have the system copy what is there.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Sequence

# From Linux 6.1 on. Python has no name for it.
_MADV_COLLAPSE = 25
_BLOCK_BYTES = 2 << 20
# In a row. A refusal may be of the moment; a system that has no such call, or no memory in one piece, is not asked for
# ever.
_MOST_REFUSALS = 8


class HugeBlocks:
    """The blocks of a map; does nothing where the system cannot make them huge.

    Args:
        memory: the map.
        stride: bytes from one page of the pool to the next. All pages are free.
    """

    def __init__(self, memory: mmap.mmap, stride: int) -> None:
        self._map = memory
        self._stride = stride
        self._first = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % _BLOCK_BYTES
        self._committed: set[int] = set()
        self._huge: set[int] = set()
        # Else a huge page could come at the first touch of one of its pages, and commit the memory of its neighbours.
        works = sys.platform == "linux" and self._advise(mmap.MADV_NOHUGEPAGE, 0, len(memory))
        self._tries_left = _MOST_REFUSALS if works else 0

    @property
    def huge_bytes(self) -> int:
        """How much of the map lies in huge pages, or will at the first touch."""
        return len(self._huge) * _BLOCK_BYTES

    def commits(self, pages: Sequence[int]) -> None:
        """Pages are about to become memory together: blocks of which no other page has a part are huge from then on."""
        if not self._tries_left:
            return
        together = set(pages)
        for block in self._blocks_of_all(pages):
            if together.issuperset(self._pages_of(block)):
                self._huge.add(block)
                self._advise(mmap.MADV_HUGEPAGE, *self._range(block))

    def committed(self, pages: Sequence[int]) -> None:
        """Pages have become memory: their blocks become huge where these were the last."""
        self._committed.update(pages)
        for block in self._blocks_of_all(pages):
            if self._committed.issuperset(self._pages_of(block)):
                self._make_huge(block)

    def decommits(self, page: int) -> None:
        """A page is about to be given back: its blocks become small before."""
        self._committed.discard(page)
        for block in self._blocks_of(page):
            if block in self._huge:
                start, length = self._range(block)
                self._advise(mmap.MADV_NOHUGEPAGE, start, length)
                # A huge page that is only unmapped in part stays with the process as a whole. This splits it.
                first, stop = max(start, page * self._stride), min(start + length, (page + 1) * self._stride)
                self._advise(mmap.MADV_FREE, first, stop - first)
                self._huge.discard(block)

    def _make_huge(self, block: int) -> None:
        place = self._range(block)
        if self._tries_left:
            if self._advise(mmap.MADV_HUGEPAGE, *place) and self._advise(_MADV_COLLAPSE, *place):
                self._huge.add(block)
                self._tries_left = _MOST_REFUSALS
                return
            self._tries_left -= 1
        self._huge.discard(block)
        self._advise(mmap.MADV_NOHUGEPAGE, *place)

    def _blocks_of_all(self, pages: Sequence[int]) -> set[int]:
        return {block for page in pages for block in self._blocks_of(page)}

    def _blocks_of(self, page: int) -> range:
        """The whole blocks of the map that a page reaches into."""
        start, stop = page * self._stride - self._first, (page + 1) * self._stride - self._first
        whole = (len(self._map) - self._first) // _BLOCK_BYTES
        return range(max(0, start // _BLOCK_BYTES), min(-(-stop // _BLOCK_BYTES), whole))

    def _pages_of(self, block: int) -> range:
        start, length = self._range(block)
        return range(start // self._stride, -(-(start + length) // self._stride))

    def _range(self, block: int) -> tuple[int, int]:
        return self._first + block * _BLOCK_BYTES, _BLOCK_BYTES

    def _advise(self, advice: int, start: int, length: int) -> bool:
        """Whether the system takes the advice."""
        try:
            self._map.madvise(advice, start, length)
        except OSError:
            return False
        return True
