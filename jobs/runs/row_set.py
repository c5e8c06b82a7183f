"""A set of numbers, with one bit for each number: those of ten million rows take 1.25 MB."""

from __future__ import annotations


class RowSet:
    """Numbers of rows, from 0."""

    def __init__(self) -> None:
        self._bits = bytearray()
        self._count = 0

    def add(self, row: int) -> bool:
        """Returns False if the row is in the set already."""
        place, bit = row >> 3, 1 << (row & 7)
        if place >= len(self._bits):
            self._bits.extend(bytes(max(place + 1 - len(self._bits), len(self._bits) // 8)))
        if self._bits[place] & bit:
            return False
        self._bits[place] |= bit
        self._count += 1
        return True

    def discard(self, row: int) -> None:
        if row in self:
            self._bits[row >> 3] &= ~(1 << (row & 7))
            self._count -= 1

    def has_all(self, count: int) -> bool:
        """True if all rows below `count` are in the set."""
        whole = count >> 3
        return self._bits[:whole].count(0xFF) == whole and all(
            row in self for row in range(8 * whole, count)
        )

    def __contains__(self, row: object) -> bool:
        if not isinstance(row, int):
            return False
        place = row >> 3
        return place < len(self._bits) and bool(self._bits[place] >> (row & 7) & 1)

    def __len__(self) -> int:
        return self._count
