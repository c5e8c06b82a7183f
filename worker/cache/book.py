"""The numbers of a model's KV cache: slots, columns, bytes, and the limit in bytes.

Each sequence occupies one slot, a row in the storage of every layer, of the model and of its draft
if it has one. Storage is allocated for all slots and its columns double, as long as the limit
allows it; otherwise it has exactly the size that is needed. When the last slot is released, storage
of up to half of the limit stays for the next sequences, since new memory costs time; `trim` frees
it. State that is kept of earlier sequences has the rest of the limit, and is evicted where storage
needs it.
"""

from __future__ import annotations

import heapq
from itertools import count

from jobs.errors import JobError
from jobs.sizes import counted, size_text, size_texts
from worker.cache.changes import Begin, CacheChange, Clear, Drop, Release, Resize
from worker.cache.prefix_store import PrefixStore, StateRef
from worker.cache.shared_columns import SharedColumns
from worker.cache.sizes import CacheSizes

FIRST_COLUMNS = 256  # tokens per slot in the first allocation


class CacheBook:
    """Owns what is known of the caches, and the changes that the device has not made yet, in order.
    Used by the thread that steps the engine."""

    def __init__(
        self,
        sizes: CacheSizes,
        *,
        max_slots: int,
        max_columns: int,
        limit_bytes: int,
    ) -> None:
        self.sizes = sizes
        self._changes: list[CacheChange] = []
        self.kept: PrefixStore[StateRef] = PrefixStore()
        self.kept.on_drop = lambda state: self.emit(Drop(state.number))
        self.shared = SharedColumns(max_slots, self.emit)
        self.limit_bytes = limit_bytes
        self._max_slots, self._max_columns = max_slots, max_columns
        self._free = list(range(max_slots))
        self._used: set[int] = set()
        self._slots = 0  # allocated rows
        self._columns = 0  # allocated tokens per row
        self._lacking: tuple[int, str] | None = None  # bytes that the device lacked, and its words
        self._numbers = count()

    def emit(self, change: CacheChange) -> None:
        """Have the device make a change, after those before it."""
        self._changes.append(change)

    def take_changes(self) -> tuple[CacheChange, ...]:
        """The changes that the device has to make next."""
        changes = tuple(self._changes)
        self._changes.clear()
        return changes

    @property
    def bytes_held(self) -> int:
        """Bytes allocated now, with those of kept state."""
        return self.sizes.storage(self._slots, self._columns) + self.kept.nbytes

    @property
    def bytes_for_kept(self) -> int:
        """Bytes that kept state may take beside the storage."""
        return self.limit_bytes - self.sizes.storage(self._slots, self._columns)

    def new_state(self, nbytes: int) -> StateRef:
        """The number of a state that will be kept, and its bytes."""
        return StateRef(next(self._numbers), nbytes)

    def acquire(self) -> int | None:
        """Returns the lowest free slot, or None. `reserve` allocates its storage."""
        if not self._free:
            return None
        slot = heapq.heappop(self._free)
        self._used.add(slot)
        return slot

    def release(self, slot: int, *, poisoned: bool = False) -> None:
        """Free a slot; `poisoned` if it may hold NaN."""
        if poisoned:
            self.spoil(slot)
        self._used.discard(slot)
        self.shared.release(slot)
        heapq.heappush(self._free, slot)
        if self.limit_bytes - self.bytes_for_kept > self.limit_bytes // 2:
            self.trim()

    def spoil(self, slot: int) -> None:
        """A slot that nobody uses may hold NaN, which is cleared."""
        if slot < self._slots:
            self.emit(Clear(slot))

    def trim(self) -> None:
        """Free the storage, unless a slot is in use."""
        if not self._used and self._slots:
            self._deallocate()

    def free_all(self) -> None:
        """Free every slot and the storage, whatever uses them or was interrupted. Changes that are
        not made yet are void."""
        self._changes.clear()
        self._free, self._used = list(range(self._max_slots)), set()
        self.shared.clear()
        self._deallocate()

    def reserve(self, slot: int, columns: int) -> bool:
        """Allocate room for `columns` tokens in every slot in use, `slot` included. Returns False,
        with nothing changed, if the limit forbids it. Kept state is evicted for what is needed now,
        and for all slots within half of the limit, but not for columns of later tokens."""
        if self._slots == self._max_slots and columns <= self._columns:
            return True
        slots = max(self._used) + 1
        if slots <= self._slots and columns <= self._columns:
            return True
        doubled = max(self._columns, FIRST_COLUMNS)
        while doubled < columns:
            doubled *= 2
        doubled = min(doubled, max(self._max_columns, columns))
        least = max(columns, self._columns)
        stepped = min(doubled, -(-least // FIRST_COLUMNS) * FIRST_COLUMNS)
        beside = self.limit_bytes - self.kept.nbytes
        for rows, size, limit in (
            (self._max_slots, doubled, beside),
            (self._max_slots, stepped, max(beside, self.limit_bytes // 2)),
            (slots, doubled, beside),
            (slots, stepped, self.limit_bytes),
            (slots, least, self.limit_bytes),
        ):
            needed = self.sizes.storage(rows, size)
            if (
                needed <= limit
                and self._may_have(needed)
                and self.kept.shrink(self.limit_bytes - needed)
            ):
                self.emit(Resize(rows, size, min(slots, self._slots)))
                self._slots, self._columns = rows, size
                return True
        return False

    def has(self, columns: int) -> bool:
        """True if each slot in use has room for `columns` tokens."""
        return columns <= self._columns

    def resize_failed(self, resize: Resize, fact: str) -> None:
        """Allocate less than this from now on: the device has no memory for it, as `fact` says."""
        self._lacking = self.sizes.storage(resize.slots, resize.columns), fact

    def forget_failure(self) -> None:
        """Allocate as much as the limit allows again."""
        self._lacking = None

    def begin(self, slot: int) -> None:
        """Prepare `slot` for a new sequence."""
        if self.sizes.needs_clearing:
            self.emit(Begin(slot))

    def bytes_for_one(self, columns: int) -> int:
        """Bytes needed by a single sequence of `columns` tokens."""
        return self.sizes.storage(1, columns)

    def fits_alone(self, columns: int) -> bool:
        """True if a single sequence of `columns` tokens stays below the limit, beside the pinned
        bytes, and the device is not known to lack the memory."""
        need = self.bytes_for_one(columns)
        return need <= self.limit_bytes - self.kept.pinned_bytes and self._may_have(need)

    def too_large(self, tokens: int) -> JobError:
        """The error of a sequence of so many tokens that never fits."""
        need, pinned = self.bytes_for_one(tokens + 1), self.kept.pinned_bytes
        if self._lacking is not None and need <= self.limit_bytes - pinned:
            return no_memory(tokens, self._lacking[1])
        beside = f", of which prompt caches have {size_text(pinned)}" if pinned else ""
        needed, limit = size_texts(need, self.limit_bytes)
        return JobError(
            "out_of_memory",
            f"a sequence of {counted(tokens, 'token')} needs {needed} of KV cache, the limit is "
            f"{limit}{beside}: shorten the prompt or max_tokens",
        )

    def close(self) -> None:
        """Free everything."""
        self.kept.clear()
        self._deallocate()

    def _may_have(self, nbytes: int) -> bool:
        return self._lacking is None or nbytes < self._lacking[0]

    def _deallocate(self) -> None:
        self.emit(Release())
        self._slots = self._columns = 0


def no_memory(tokens: int, fact: str) -> JobError:
    """The error of a sequence of so many tokens for which the device has no memory."""
    return JobError(
        "out_of_memory",
        f"no memory for {counted(tokens, 'token')}: {fact}; shorten the prompt or max_tokens",
    )
