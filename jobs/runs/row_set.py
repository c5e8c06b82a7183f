"""A set of numbers, with one bit for each number: those of ten million rows take 1.6 MB."""

from __future__ import annotations

PAGE_BYTES = 512
PAGE_ROWS = 8 * PAGE_BYTES
FULL = bytearray(b"\xff" * PAGE_BYTES)


class RowSet:
    """Numbers of rows, from 0. Memory is taken for pages that have one: a number that is far from
    the others takes one page."""

    def __init__(self) -> None:
        self._pages: dict[int, bytearray] = {}
        self._count = 0

    def add(self, row: int) -> bool:
        """Returns False if the row is in the set already."""
        place, bit = row >> 3, 1 << (row & 7)
        page = self._pages.get(place // PAGE_BYTES)
        if page is None:
            page = self._pages[place // PAGE_BYTES] = bytearray(PAGE_BYTES)
        if page[place % PAGE_BYTES] & bit:
            return False
        page[place % PAGE_BYTES] |= bit
        self._count += 1
        return True

    def discard(self, row: int) -> None:
        if row in self:
            place = row >> 3
            self._pages[place // PAGE_BYTES][place % PAGE_BYTES] &= ~(1 << (row & 7))
            self._count -= 1

    def has_all(self, count: int) -> bool:
        """True if all rows below `count` are in the set."""
        whole = count // PAGE_ROWS
        return all(self._pages.get(number) == FULL for number in range(whole)) and all(
            row in self for row in range(whole * PAGE_ROWS, count)
        )

    def __contains__(self, row: object) -> bool:
        if not isinstance(row, int):
            return False
        place = row >> 3
        page = self._pages.get(place // PAGE_BYTES)
        return page is not None and bool(page[place % PAGE_BYTES] >> (row & 7) & 1)

    def __len__(self) -> int:
        return self._count
