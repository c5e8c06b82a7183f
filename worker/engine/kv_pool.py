"""The memory of all sequences of one model: slots, their growth, and the limit on bytes.

Each sequence has one slot, a row in every layer's storage. There are rows for all slots, and
columns double, where the limit allows it; else both are what is needed. All is given back when
nobody uses it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from worker.layers.cache import LayerCache

FIRST_COLUMNS = 256  # tokens per slot that storage starts with


class CachePool:
    """Owns the layers' caches and which slots are free. Used by the engine's thread alone."""

    def __init__(
        self,
        make_caches: Callable[[], list[LayerCache]],
        *,
        max_slots: int,
        max_columns: int,
        limit_bytes: int,
    ) -> None:
        self._make_caches = make_caches
        self.layers: Sequence[LayerCache] = make_caches()
        self._max_slots, self._max_columns = max_slots, max_columns
        self.limit_bytes = limit_bytes
        self._free = list(range(max_slots))
        self._used: set[int] = set()
        self._slots = 0  # rows and columns of the storage
        self._columns = 0

    @property
    def bytes_held(self) -> int:
        """Size of the storage now."""
        return self._bytes(self._slots, self._columns)

    def acquire(self) -> int | None:
        """The lowest free slot, or None. Its storage comes with `reserve`."""
        if not self._free:
            return None
        slot = heapq.heappop(self._free)
        self._used.add(slot)
        return slot

    def release(self, slot: int, *, spoiled: bool = False) -> None:
        """Give a slot back; `spoiled` if it may hold NaN."""
        if slot < self._slots and spoiled:
            self._clear(slot)
        self._used.discard(slot)
        heapq.heappush(self._free, slot)
        if not self._used:
            self._drop()

    def reserve(self, slot: int, columns: int) -> bool:
        """Make sure that the slots in use, `slot` among them, hold `columns` tokens. False if the
        limit forbids it; nothing has changed then."""
        slots = max(self._used) + 1
        if slots <= self._slots and columns <= self._columns:
            return True
        wider = max(self._columns, FIRST_COLUMNS)
        while wider < columns:
            wider *= 2
        wider = min(wider, max(self._max_columns, columns))
        for rows, size in (
            (self._max_slots, wider),
            (slots, wider),
            (slots, max(columns, self._columns)),
        ):
            if self._bytes(rows, size) <= self.limit_bytes:
                for layer in self.layers:
                    layer.resize(rows, size, keep=min(slots, self._slots))
                self._slots, self._columns = rows, size
                return True
        return False

    def start(self, slot: int) -> None:
        """A new sequence begins in `slot`: what an earlier one left is forgotten."""
        for layer in self.layers:
            if layer.needs_clearing:
                layer.clear(slot)

    def bytes_for_one(self, columns: int) -> int:
        """Bytes that one sequence of `columns` tokens needs when it is alone."""
        return self._bytes(1, columns)

    def fits_alone(self, columns: int) -> bool:
        return self.bytes_for_one(columns) <= self.limit_bytes

    def _bytes(self, slots: int, columns: int) -> int:
        return sum(layer.bytes_for(slots, columns) for layer in self.layers)

    def _clear(self, slot: int) -> None:
        for layer in self.layers:
            layer.clear(slot)

    def _drop(self) -> None:
        self.layers = self._make_caches()
        self._slots = self._columns = 0
