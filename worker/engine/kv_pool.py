"""KV cache memory of one model: slots, growth of their storage, and the limit in bytes.

Each sequence occupies one slot, a row in the storage of every layer. Storage is allocated for all
slots and its columns double, as long as the limit allows it; otherwise it has exactly the size that
is needed. It is freed when the last slot is released.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from worker.layers.cache import LayerCache

FIRST_COLUMNS = 256  # tokens per slot in the first allocation


class CachePool:
    """Owns the layers' caches and the free slots. Used by the thread that steps the engine."""

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
        self._slots = 0  # allocated rows
        self._columns = 0  # allocated tokens per row

    @property
    def bytes_held(self) -> int:
        """Bytes allocated now."""
        return self._bytes(self._slots, self._columns)

    def acquire(self) -> int | None:
        """Returns the lowest free slot, or None. `reserve` allocates its storage."""
        if not self._free:
            return None
        slot = heapq.heappop(self._free)
        self._used.add(slot)
        return slot

    def release(self, slot: int, *, poisoned: bool = False) -> None:
        """Free a slot; `poisoned` if it may hold NaN, which is then cleared."""
        if slot < self._slots and poisoned:
            for layer in self.layers:
                layer.clear(slot)
        self._used.discard(slot)
        heapq.heappush(self._free, slot)
        if not self._used:
            self._deallocate()

    def reserve(self, slot: int, columns: int) -> bool:
        """Allocate room for `columns` tokens in every slot in use, `slot` included. Returns False,
        with nothing changed, if the limit forbids it."""
        slots = max(self._used) + 1
        if slots <= self._slots and columns <= self._columns:
            return True
        doubled = max(self._columns, FIRST_COLUMNS)
        while doubled < columns:
            doubled *= 2
        doubled = min(doubled, max(self._max_columns, columns))
        for rows, size in (
            (self._max_slots, doubled),
            (slots, doubled),
            (slots, max(columns, self._columns)),
        ):
            if self._bytes(rows, size) <= self.limit_bytes:
                for layer in self.layers:
                    layer.resize(rows, size, keep=min(slots, self._slots))
                self._slots, self._columns = rows, size
                return True
        return False

    def reset(self, slot: int) -> None:
        """Prepare `slot` for a new sequence: clear state that it would read from the last one."""
        for layer in self.layers:
            if layer.needs_clearing:
                layer.clear(slot)

    def bytes_for_one(self, columns: int) -> int:
        """Bytes needed by a single sequence of `columns` tokens."""
        return self._bytes(1, columns)

    def fits_alone(self, columns: int) -> bool:
        """Whether a single sequence of `columns` tokens stays below the limit."""
        return self.bytes_for_one(columns) <= self.limit_bytes

    def close(self) -> None:
        """Free the storage, and the model that `make_caches` belongs to."""
        self._make_caches = list
        self._deallocate()

    def _bytes(self, slots: int, columns: int) -> int:
        return sum(layer.bytes_for(slots, columns) for layer in self.layers)

    def _deallocate(self) -> None:
        self.layers = self._make_caches()
        self._slots = self._columns = 0
