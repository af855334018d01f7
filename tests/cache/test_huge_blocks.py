"""Blocks of pages in use become huge pages of the system, and what is committed stays what is counted."""

from __future__ import annotations

import mmap
import random

import pytest
import torch

from cache_checks import committed_bytes
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
            taken.append(pool.take())
            pool.pages[taken[-1]] = 7
        assert committed_bytes(pool) == pool.bytes_in_use
        most = max(most, blocks.huge_bytes)
    assert most > 0


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
