"""What must hold of a KV cache at any time, whatever was done to it."""

from __future__ import annotations

import mmap
import sys
from collections import Counter
from pathlib import Path

from kvist.cache.kv_cache import KVCache
from kvist.cache.page_layout import PAGE_SLOTS
from kvist.cache.page_pool import PagePool

_PAGEMAP = Path("/proc/self/pagemap")
_IN_MEMORY_OR_SWAPPED = 3 << 62


def check_books(cache: KVCache) -> None:
    """Every page is free or in use, its owners are those that have it, and the account is within the budget."""
    sequences = list(cache._sequences.values())
    for index, group in enumerate(cache.groups):
        pool, window = group.pool, group.layer_group.window
        owners: Counter[int] = Counter()
        for sequence in sequences:
            table = sequence.tables[index]
            assert len(set(table.pages)) == len(table.pages), "a page is twice in one table"
            owners.update([*table.pages, *table._leaving])
            assert table.stop * PAGE_SLOTS >= sequence.length, "tokens without a page"
            if window is not None:
                assert table.first * PAGE_SLOTS <= max(0, sequence.length - window + 1), "the next query lacks tokens"
            else:
                assert table.first == 0
            assert sequence.length <= sequence.reserved
        assert pages_free(pool) + pool.pages_in_use == pool.max_pages
        assert pool.pages_in_use == len(owners)
        assert all(pool.owners(page) == count for page, count in owners.items())
    assert bytes_in_use(cache) <= cache.used_bytes <= cache.config.memory_bytes


def bytes_in_use(cache: KVCache) -> int:
    """Bytes of the pages in use alone, without those that are promised."""
    return sum(group.pool.bytes_in_use for group in cache.groups)


def reserved_tokens(cache: KVCache, sequence_id: int) -> int:
    """Tokens that a sequence may grow to; its length where it has nothing reserved."""
    return cache._sequences[sequence_id].reserved


def pages_free(pool: PagePool) -> int:
    """How many pages of a pool could be taken."""
    return len(pool._returned) + pool.max_pages - pool._untouched


def committed_bytes(pool: PagePool) -> int | None:
    """The memory that the system has given to a pool's pages; None where it does not say."""
    if sys.platform != "linux" or not _PAGEMAP.exists():
        return None
    first, count = pool.pages.data_ptr() // mmap.PAGESIZE, pool.pages.nbytes // mmap.PAGESIZE
    with _PAGEMAP.open("rb", buffering=0) as file:
        file.seek(first * 8)
        entries = memoryview(file.read(count * 8)).cast("Q")
    assert len(entries) == count
    return sum(bool(entry & _IN_MEMORY_OR_SWAPPED) for entry in entries) * mmap.PAGESIZE


def huge_bytes(pool: PagePool) -> int | None:
    """How much of a pool's memory the system has in huge pages; None where it does not say."""
    smaps = Path("/proc/self/smaps")
    if not smaps.exists():
        return None
    first, stop = pool.pages.data_ptr(), pool.pages.data_ptr() + pool.pages.nbytes
    total, inside = 0, False
    for line in smaps.read_text(encoding="ascii", errors="replace").splitlines():
        name, _, rest = line.partition(" ")
        if name.startswith("AnonHugePages") and inside:
            total += int(rest.split()[0]) * 1024
        elif not name.endswith(":"):  # the range of addresses that the lines below are about
            start, end = (int(bound, 16) for bound in name.split("-"))
            inside = first <= start and end <= stop
    return total
