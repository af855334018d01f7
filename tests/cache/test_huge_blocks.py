"""Blocks of pages in use become huge pages of the system, and what is committed stays what is counted."""

from __future__ import annotations

import mmap
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from cache_checks import committed_bytes, huge_bytes
from kvist.cache.huge_blocks import HugeBlocks
from kvist.cache.page_pool import PagePool, ReservedRange

MIB = 1 << 20


def pool_of(page_bytes: int, max_pages: int) -> tuple[PagePool, HugeBlocks]:
    storage = ReservedRange(max_pages, page_bytes)
    return PagePool(page_bytes, max_pages, storage=storage), storage.blocks


@pytest.fixture(scope="module", autouse=True)
def _system_has_huge_pages() -> None:
    pool, blocks = pool_of(2 * MIB, 4)
    while pool.pages_in_use < pool.max_pages:
        pool.take()
    if not blocks.huge_bytes:
        pytest.skip("this system gives no huge pages on demand")


def test_a_block_is_huge_while_all_pages_that_reach_into_it_are_in_use() -> None:
    pool, blocks = pool_of(768 * 1024, 16)  # 12 MiB, of which 5 or 6 are whole blocks
    pages = [pool.take() for _ in range(15)]
    before = blocks.huge_bytes
    pages.append(pool.take())
    assert 8 * MIB <= before <= blocks.huge_bytes <= 12 * MIB
    whole = blocks.huge_bytes
    pool.give_back(8)  # in one block, or across the border of two
    assert blocks.huge_bytes in (whole - 2 * MIB, whole - 4 * MIB)
    assert pool.take() == 8
    assert blocks.huge_bytes == whole


def test_pages_that_are_taken_together_are_huge_from_the_first_touch(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, blocks = pool_of(768 * 1024, 32)
    touched: list[int | None] = []

    def committed(of: HugeBlocks, pages: Sequence[int]) -> None:
        touched.append(huge_bytes(pool))

    with monkeypatch.context() as patched:
        patched.setattr(HugeBlocks, "committed", committed)  # does not ask for what is there already
        pages = pool.take_together(16)
    if touched == [None]:
        pytest.skip("this system does not say which memory lies in huge pages")
    assert pages == list(range(16))
    assert touched[0] is not None
    assert 8 * MIB <= touched[0] <= 12 * MIB
    assert committed_bytes(pool) == pool.bytes_in_use
    blocks.committed(pages)
    assert blocks.huge_bytes == touched[0]


def test_what_pages_hold_survives_and_a_page_that_comes_back_is_zero() -> None:
    pool, blocks = pool_of(192 * 1024, 64)
    for _ in range(64):
        page = pool.take()
        pool.pages[page] = page + 1
    assert blocks.huge_bytes >= 8 * MIB
    pool.give_back(20)
    assert pool.take() == 20
    for page in range(64):
        assert (pool.pages[page] == (0 if page == 20 else page + 1)).all()


@pytest.mark.parametrize("page_bytes", [mmap.PAGESIZE * 75, MIB, 5 * MIB // 2 // mmap.PAGESIZE * mmap.PAGESIZE])
def test_the_system_commits_what_is_counted(page_bytes: int) -> None:
    rng = random.Random(page_bytes)
    pool, blocks = pool_of(page_bytes, 24 * MIB // page_bytes)
    if committed_bytes(pool) is None:
        pytest.skip("this system does not say which memory is committed")
    taken: list[int] = []
    most = 0
    for _ in range(200):
        if taken and (rng.random() < 0.4 or len(taken) == pool.max_pages):
            pool.give_back(taken.pop(rng.randrange(len(taken))))
        else:
            count = min(rng.choice((1, 1, 5)), pool.max_pages - len(taken))
            taken += pool.take_together(count)
            for page in taken[-count:]:
                pool.pages[page] = 7
        assert committed_bytes(pool) == pool.bytes_in_use
        most = max(most, blocks.huge_bytes)
    assert most > 0


def test_what_is_given_back_of_a_huge_page_is_split_from_it() -> None:
    """Else all of it stays with the process, though no page that is mapped tells."""
    pool, blocks = pool_of(MIB, 33)
    pool.take_together(33)
    pool.pages[:] = 7  # what is all zeros goes in any case
    num_blocks = blocks.huge_bytes // (2 * MIB)
    before = splits()
    if before is None:
        pytest.skip("this system does not count huge pages that are split")
    for page in range(0, 33, 2):
        pool.give_back(page)
    after = splits()
    assert after is not None
    assert after - before >= num_blocks >= 15
    assert blocks.huge_bytes == 0
    assert (pool.pages[1::2] == 7).all()


def splits() -> int | None:
    """Huge pages that the system has split since it started."""
    counters = Path("/proc/vmstat")
    lines = counters.read_text(encoding="ascii").splitlines() if counters.exists() else []
    return next((int(line.split()[1]) for line in lines if line.startswith("thp_split_page ")), None)


@pytest.mark.parametrize("at", ["commits", "committed"])
def test_an_interrupt_leaves_no_memory(monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    pool, blocks = pool_of(256 * 1024, 40)
    act = getattr(HugeBlocks, at)

    def interrupted(of: HugeBlocks, pages: Sequence[int]) -> None:
        act(of, pages)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(HugeBlocks, at, interrupted)
        with pytest.raises(KeyboardInterrupt):
            pool.take_together(40)
    assert pool.bytes_in_use == blocks.huge_bytes == 0
    if committed_bytes(pool) is not None:
        assert committed_bytes(pool) == 0
        pool.take()
        assert committed_bytes(pool) == pool.bytes_in_use


def test_refusals_of_the_moment_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    advise, moments = HugeBlocks._advise, iter((False, True, True) * 40)

    def sometimes(blocks: HugeBlocks, advice: int, start: int, length: int) -> bool:
        return not (advice == 25 and next(moments)) and advise(blocks, advice, start, length)

    monkeypatch.setattr(HugeBlocks, "_advise", sometimes)
    pool, blocks = pool_of(2 * MIB, 80)
    for _ in range(80):
        pool.take()
    refused = 80 * 2 * MIB - blocks.huge_bytes
    assert 40 * 2 * MIB < refused < 60 * 2 * MIB, "asked no more after the first refusals"


def test_where_the_system_refuses_pages_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def refuse(blocks: HugeBlocks, advice: int, start: int, length: int) -> bool:
        asked.append(advice)
        return advice != 25

    monkeypatch.setattr(HugeBlocks, "_advise", refuse)
    pool, blocks = pool_of(MIB, 64)
    pages = [pool.take() for _ in range(64)]
    assert blocks.huge_bytes == 0
    assert asked.count(25) == 8, "asked for ever"
    for page in pages:
        pool.give_back(page)
    assert torch.equal(pool.pages[pool.take()], torch.zeros(MIB, dtype=torch.uint8))
