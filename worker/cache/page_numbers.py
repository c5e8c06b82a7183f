"""The numbers of a cache's pages: those of each slot, those that are kept, and the free ones."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

from worker.layers.cache import pages_for

Row = tuple[int, int, int]  # a slot, a number among its pages, and the page


class Keeper(Protocol):
    """Has a page, or none."""

    page: int | None


class PageNumbers:
    """Knows who has each page: slots, which may share it, and a keeper. The lowest free pages are
    taken first."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._held: dict[int, list[int]] = {}  # by slot, in the order of its tokens
        self._holders: Counter[int] = Counter()  # slots that have a page
        self._kept: dict[int, Keeper] = {}
        self._total = 0

    @property
    def used(self) -> int:
        """The number of pages that slots or keepers have."""
        return self._total - len(self._free)

    @property
    def in_slots(self) -> int:
        """The number of pages that slots have."""
        return len(self._holders)

    @property
    def free(self) -> int:
        return len(self._free)

    def of(self, slot: int) -> Sequence[int]:
        """The pages of a slot."""
        return self._held.get(slot, ())

    def in_slot(self, page: int) -> bool:
        """True if a slot has the page."""
        return page in self._holders

    def missing(self, slot: int, columns: int) -> int:
        """Pages that a slot lacks for so many tokens."""
        return max(0, pages_for(columns) - len(self.of(slot)))

    def lacking(self, needed: Iterable[tuple[int, int]]) -> dict[int, int]:
        """Pages that slots lack for so many tokens each, of those that lack any."""
        held = self._held
        return {
            slot: lacking
            for slot, columns in needed
            if (lacking := pages_for(columns) - len(held.get(slot, ()))) > 0
        }

    def grow(self, total: int) -> None:
        """There are so many pages from now on."""
        assert total >= self._total
        self._free += range(self._total, total)  # greater than all before them
        self._total = total

    def take(self, slot: int, pages: Sequence[int | None]) -> list[Row]:
        """Give a slot further pages: those with numbers, and free ones for None."""
        held = self._held.setdefault(slot, [])
        start = len(held)
        held += [heapq.heappop(self._free) if page is None else page for page in pages]
        self._holders.update(held[start:])
        return [(slot, number, held[number]) for number in range(start, len(held))]

    def take_free(self) -> int:
        """A free page, for `keep`."""
        return heapq.heappop(self._free)

    def release(self, slot: int) -> None:
        """A slot has no pages any more."""
        for page in self._held.pop(slot, ()):
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]
                if page not in self._kept:
                    heapq.heappush(self._free, page)

    def keep(self, page: int, keeper: Keeper) -> None:
        """A page stays as long as its keeper wants it."""
        assert page not in self._kept
        self._kept[page], keeper.page = keeper, page

    def kept(self, page: int) -> bool:
        """True if a page has a keeper."""
        return page in self._kept

    def drop(self, page: int) -> None:
        """A page has no keeper any more."""
        self._kept.pop(page).page = None
        if page not in self._holders:
            heapq.heappush(self._free, page)

    def shrink(self, total: int) -> tuple[list[tuple[int, int]], list[Row]]:
        """There are so many pages from now on, and no fewer than are used. Returns which pages have
        to move where, and the rows of the slots that this changes."""
        assert total >= self.used
        free = [page for page in self._free if page < total]
        heapq.heapify(free)
        used = self._holders.keys() | self._kept.keys()
        moved = {page: heapq.heappop(free) for page in sorted(used) if page >= total}
        rows = []
        for slot, held in self._held.items():
            for number, page in enumerate(held):
                if page in moved:
                    held[number] = moved[page]
                    rows.append((slot, number, held[number]))
        self._holders = Counter({moved.get(page, page): n for page, n in self._holders.items()})
        self._kept = {moved.get(page, page): keeper for page, keeper in self._kept.items()}
        for page, keeper in self._kept.items():
            keeper.page = page
        self._free, self._total = free, total
        return [*moved.items()], rows

    def clear(self) -> None:
        """There are no pages any more."""
        for keeper in self._kept.values():
            keeper.page = None
        self._free, self._held, self._total = [], {}, 0
        self._kept, self._holders = {}, Counter()
