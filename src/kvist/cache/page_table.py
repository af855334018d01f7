"""Which pages a sequence has in a layer group, and how many it may come to need.

                first                        stop
      +- - -+- - -+-----+-----+-----+-----+- - -+- - -
      : gone: gone| p7  | p3  | p9  | p4  : next:        page number: position // 64
      +- - -+- - -+-----+-----+-----+-----+- - -+- - -
                                 |     |
                               length  end of the step that is being computed

Pages before `first` held tokens that no query can see any more: only groups with a window drop them. The page that
`length` points into may be shared with forks; it is copied before it is written to.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from kvist.cache.page_layout import PAGE_SLOTS
from kvist.cache.page_pool import PagePool


def pages_of(num_tokens: int) -> int:
    """How many pages hold a sequence's first `num_tokens` tokens."""
    return -(-num_tokens // PAGE_SLOTS)


@dataclass(frozen=True)
class PageRules:
    """How many pages of a group its sequences need: the formula of the allocator, and of whoever plans with it.

    Args:
        window: tokens that a query of the group sees, itself included; None sees all.
        rewind_slack_tokens: how far a sequence can be rewound with all that the next query sees still there.
        max_step_tokens: the most tokens of a sequence in one step.
    """

    window: int | None
    rewind_slack_tokens: int
    max_step_tokens: int

    @property
    def most_live(self) -> int | None:
        """The most pages that a sequence of any length has at once; None where that has no bound.

        They hold the window of a step's first query, the slack before it and the step's own tokens, a run that begins
        and ends anywhere in a page. From its first token to its last are `window - 1 + slack + step - 1` positions.
        """
        if self.window is None:
            return None
        return pages_of(self.window + self.rewind_slack_tokens + self.max_step_tokens - 2) + 1

    def most_pages(self, num_tokens: int) -> int:
        """The most pages that a sequence has at once while it grows from nothing to `num_tokens`."""
        pages, most = pages_of(num_tokens), self.most_live
        return pages if most is None else min(pages, most)

    def first_needed(self, length: int) -> int:
        """The number of the first page that is kept of a sequence of `length` tokens."""
        if self.window is None:
            return 0
        return max(0, length - self.rewind_slack_tokens - self.window + 1) // PAGE_SLOTS

    def sees_before(self, number: int, position: int) -> bool:
        """Whether a query at `position` sees tokens of pages before a number, besides itself."""
        if position == 0:
            return False
        oldest = 0 if self.window is None else max(0, position - self.window + 1)
        return oldest < number * PAGE_SLOTS


class PageTable:
    """The pages of one sequence in one group, in order. It owns them, alone or with others.

    Args:
        pool: where the pages are.
        rules: how many there can be.

    Attributes:
        first: the number of the first page that is there; those before it were dropped.
        pages: the pages in the pool, one after another from number `first` on.
    """

    def __init__(self, pool: PagePool, rules: PageRules) -> None:
        self.first = 0
        self.pages: list[int] = []
        self._pool = pool
        self._rules = rules
        self._tensor: torch.Tensor | None = None
        # Pages that are no longer the table's, and not given back yet: some are left where an interrupt comes between.
        self._leaving: list[int] = []

    @property
    def stop(self) -> int:
        """The number of the page that is taken next."""
        return self.first + len(self.pages)

    @property
    def num_bytes(self) -> int:
        """Bytes of the pages that are there, shared ones counted in full."""
        return len(self.pages) * self._pool.stride

    def tensor(self) -> torch.Tensor:
        """`pages` as int64 on the pool's device, made anew only where they have changed."""
        if self._tensor is None:
            self._tensor = torch.tensor(self.pages, dtype=torch.int64, device=self._pool.pages.device)
        return self._tensor

    def promise(self, length: int, reserved: int, *, rewound: bool = False, leaving: Collection[int] = ()) -> int:
        """How many pages must be kept free so that the sequence can grow from `length` tokens to `reserved`.

        It may take that many more than it gives back meanwhile. A page that it alone owns makes room for another when
        it leaves the window; a shared one does not, since the others may keep it.

        Args:
            length: tokens that it has, or is to be rewound to.
            reserved: tokens that it may grow to.
            rewound: whether to count as it will be once it is rewound to `length`.
            leaving: pages that lose an owner by then.
        """
        if reserved <= length:
            return 0
        first, pages = self._kept_at(length) if rewound else (self.first, self.pages)
        missing = max(0, pages_of(reserved) - first - len(pages))
        tail = length // PAGE_SLOTS - first
        if tail < len(pages) and self._is_shared(pages[tail], leaving):
            missing += 1
        most = self._rules.most_live
        if most is None:
            return missing
        alone = sum(not self._is_shared(page, leaving) for page in pages)
        return min(missing, max(0, most - alone))

    def prepare(self, length: int, stop: int) -> None:
        """Make positions from `length` to before `stop`, one at least, writable. Pages for them must be promised.

        The page that they begin in is copied where it is shared, those that are missing are taken.
        """
        tail = length // PAGE_SLOTS - self.first
        if tail < len(self.pages) and self._is_shared(self.pages[tail]):
            shared, copy = self.pages[tail], self._pool.take()
            try:
                self._pool.copy(shared, copy)
            except BaseException:  # an interrupt
                self._pool.give_back(copy)
                raise
            self._keep(self.first, [*self.pages[:tail], copy, *self.pages[tail + 1 :]], [shared])
            self.give_back()
        if self.stop < pages_of(stop):
            self.pages += self._pool.take_together(pages_of(stop) - self.stop)
            self._tensor = None

    def drop_unneeded(self, length: int) -> None:
        """Give back the pages that no query sees any more in a sequence of `length` tokens."""
        number = self._rules.first_needed(length)
        if number > self.first:
            gone, kept = self.pages[: number - self.first], self.pages[number - self.first :]
            self._keep(number, kept, gone)
            self.give_back()

    def rewound_length(self, length: int) -> int:
        """The longest length up to `length` at which all that the next query sees is there."""
        return 0 if self._rules.sees_before(self.first, length) else length

    def beyond(self, length: int) -> list[int]:
        """The pages that are given back where the sequence is rewound to `length`."""
        return self.pages[len(self._kept_at(length)[1]) :]

    def forget_from(self, length: int) -> None:
        """Have no more pages than `length` tokens need. `give_back` gives the others back."""
        self._keep(*self._kept_at(length), self.beyond(length))

    def give_back(self) -> None:
        """Give back the pages that are no longer the table's."""
        while self._leaving:
            self._pool.give_back(self._leaving.pop())

    def fork(self, length: int) -> PageTable:
        """A table that shares the pages of the first `length` tokens."""
        other = PageTable(self._pool, self._rules)
        other.first, shared = self._kept_at(length)
        for page in shared:
            self._pool.share(page)
            other.pages.append(page)
        return other

    def _kept_at(self, length: int) -> tuple[int, list[int]]:
        """`first` and `pages` after rewinding to `length`."""
        return (self.first, self.pages[: pages_of(length) - self.first]) if length else (0, [])

    def _keep(self, first: int, kept: list[int], gone: list[int]) -> None:
        self._leaving += gone
        self.first, self.pages, self._tensor = first, kept, None

    def _is_shared(self, page: int, leaving: Collection[int] = ()) -> bool:
        return self._pool.owners(page) - (page in leaving) > 1
