"""The pool: pages are taken, shared and given back, and cost memory only in between."""

from __future__ import annotations

import mmap
import random

import pytest
import torch

from cache_checks import committed_bytes, pages_free
from kvist.cache.page_pool import GrowingTensor, PagePool, ReservedRange, page_stride
from kvist.errors import CacheFullError

KINDS = ("reserved", "growing")
STRIDE = mmap.PAGESIZE


def pool_of(kind: str, max_pages: int = 8, page_bytes: int = 100) -> PagePool:
    stride = page_stride(page_bytes)
    storage = ReservedRange(max_pages, stride) if kind == "reserved" else GrowingTensor(max_pages, stride, "cpu")
    return PagePool(page_bytes, max_pages, storage=storage)


@pytest.mark.parametrize(("page_bytes", "pages"), [(1, 1), (STRIDE - 1, 1), (STRIDE, 1), (STRIDE + 1, 2)])
def test_a_page_costs_whole_pages_of_the_system(page_bytes: int, pages: int) -> None:
    assert page_stride(page_bytes) == pages * STRIDE
    assert PagePool(page_bytes, 3).pages.shape == (3, pages * STRIDE)


@pytest.mark.parametrize("kind", KINDS)
def test_the_lowest_free_page_is_taken_first(kind: str) -> None:
    pool = pool_of(kind)
    assert [pool.take() for _ in range(5)] == [0, 1, 2, 3, 4]
    for page in (3, 0, 2):
        pool.give_back(page)
    assert [pool.take() for _ in range(4)] == [0, 2, 3, 5]


@pytest.mark.parametrize("kind", KINDS)
def test_pages_that_are_taken_together_are_the_same_as_one_by_one(kind: str) -> None:
    pool = pool_of(kind)
    assert pool.take_together(5) == [0, 1, 2, 3, 4]
    for page in (3, 0, 2):
        pool.give_back(page)
    assert pool.take_together(0) == []
    assert pool.take_together(4) == [0, 2, 3, 5]
    with pytest.raises(CacheFullError, match="all 8 pages are in use"):
        pool.take_together(3)
    assert (pool.pages_in_use, pages_free(pool)) == (6, 2)
    assert not pool.pages.any()
    assert pool.take_together(2) == [6, 7]


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_is_free_when_its_last_owner_has_left(kind: str) -> None:
    pool = pool_of(kind)
    page = pool.take()
    pool.share(page)
    pool.share(page)
    assert (pool.owners(page), pool.pages_in_use, pages_free(pool)) == (3, 1, 7)
    pool.give_back(page)
    pool.give_back(page)
    assert (pool.owners(page), pool.pages_in_use) == (1, 1)
    pool.give_back(page)
    assert (pool.owners(page), pool.pages_in_use, pages_free(pool)) == (0, 0, 8)


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_is_all_zeros_when_it_is_taken(kind: str) -> None:
    pool = pool_of(kind)
    for _ in range(3):
        pages = [pool.take() for _ in range(8)]
        assert not pool.pages.any()
        pool.pages[:] = 255
        for page in pages:
            pool.give_back(page)


@pytest.mark.parametrize("kind", KINDS)
def test_pages_keep_their_bytes_while_others_come_and_go(kind: str) -> None:
    pool, rng = pool_of(kind, max_pages=50), random.Random(0)
    marks: dict[int, int] = {}
    for step in range(500):
        if marks and (pages_free(pool) == 0 or rng.random() < 0.4):
            page = rng.choice(list(marks))
            assert (pool.pages[page] == marks.pop(page)).all()
            pool.give_back(page)
        else:
            page = pool.take()
            marks[page] = step % 255 + 1
            pool.pages[page] = marks[page]
        assert pages_free(pool) + pool.pages_in_use == 50
        assert pool.pages_in_use == len(marks)
    for page, mark in marks.items():
        assert (pool.pages[page] == mark).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_has_the_same_bytes(kind: str) -> None:
    pool = pool_of(kind)
    one, other = pool.take(), pool.take()
    pool.pages[one] = torch.randint(256, (STRIDE,), dtype=torch.uint8)
    pool.copy(one, other)
    assert torch.equal(pool.pages[one], pool.pages[other])


@pytest.mark.parametrize("kind", KINDS)
def test_misuse_is_refused_and_changes_nothing(kind: str) -> None:
    pool = pool_of(kind, max_pages=2)
    page = pool.take()
    for misuse in (pool.share, pool.give_back, lambda free: pool.copy(page, free), lambda free: pool.copy(free, page)):
        with pytest.raises(ValueError, match="page 1 is not in use"):
            misuse(1)
    pool.take()
    with pytest.raises(CacheFullError, match="all 2 pages are in use"):
        pool.take()
    assert (pool.pages_in_use, pages_free(pool), pool.owners(page)) == (2, 0, 1)


def test_memory_is_committed_page_by_page_and_given_back() -> None:
    pool = pool_of("reserved", max_pages=64, page_bytes=5 * STRIDE)
    if committed_bytes(pool) is None:
        pytest.skip("this system does not say which memory is committed")
    assert committed_bytes(pool) == pool.bytes_in_use == 0
    pages = [pool.take() for _ in range(10)]
    assert committed_bytes(pool) == pool.bytes_in_use == 50 * STRIDE
    for page in pages[::2]:
        pool.give_back(page)
    assert committed_bytes(pool) == pool.bytes_in_use == 25 * STRIDE
    pool.pages[pages[1]] = 1
    assert committed_bytes(pool) == pool.bytes_in_use


def test_a_reserved_range_may_be_larger_than_the_memory() -> None:
    pool = PagePool(2**20, 2**20)  # 1 TiB
    assert pool.take() == 0
    assert pool.pages.shape == (2**20, 2**20)


def test_a_range_that_the_system_does_not_grant_is_refused() -> None:
    with pytest.raises(CacheFullError, match=r"no address range of .* [KMGT]iB for .* lower kv_memory"):
        ReservedRange(2**30, 2**30)
    with pytest.raises(CacheFullError, match="no address range"):
        ReservedRange(2**40, 2**40)


def test_pages_taken_in_inference_mode_can_be_written_outside() -> None:
    pool = pool_of("growing")
    with torch.inference_mode():
        page = pool.take()
    pool.pages[page] = 1
    pool.give_back(page)
