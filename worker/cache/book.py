"""The numbers of a model's KV cache: slots, columns and bytes, within its share of the memory.

Each sequence occupies one slot, a row in the storage of every layer, of the model and of its draft
if it has one. Storage is allocated for all slots and its columns double, as long as the share
allows it; otherwise it has exactly the size that is needed. When the last slot is released, storage
of up to half of the limit stays for the next sequences, since new memory costs time; `trim` frees
it. State that is kept of earlier sequences has the rest of the limit, and is evicted where storage
needs it. When other models need memory, `give_back` shrinks both to what sequences use.
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
from worker.cache_memory import CacheShare

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
        share: CacheShare,
    ) -> None:
        self.sizes = sizes
        self._changes: list[CacheChange] = []
        self.kept: PrefixStore[StateRef] = PrefixStore()
        self.kept.on_drop = lambda state: self.emit(Drop(state.number))
        self.shared = SharedColumns(max_slots, self.emit)
        self._share = share
        self._max_slots, self._max_columns = max_slots, max_columns
        self._free = list(range(max_slots))
        self._used: dict[int, int] = {}  # the columns that each slot in use needs
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
    def limit_bytes(self) -> int:
        """Bytes that storage and kept state may take now."""
        return self._share.limit

    @property
    def bytes_needed(self) -> int:
        """Bytes that the sequences in slots need, with pinned state."""
        return self._storage_needed() + self.kept.pinned_bytes

    @property
    def bytes_held(self) -> int:
        """Bytes allocated now, with those of kept state."""
        return self.sizes.storage(self._slots, self._columns) + self.kept.nbytes

    @property
    def bytes_for_kept(self) -> int:
        """Bytes that kept state may take beside the storage."""
        return self.limit_bytes - self.sizes.storage(self._slots, self._columns)

    def room_for(self, nbytes: int) -> int:
        """`bytes_for_kept`, after other models have given back what they don't need for so many
        more bytes of it, up to this model's fair part."""
        self._share.take(min(self.bytes_held + nbytes, self._share.fair))
        return self.bytes_for_kept

    def new_state(self, nbytes: int) -> StateRef:
        """The number of a state that will be kept, and its bytes."""
        return StateRef(next(self._numbers), nbytes)

    def acquire(self) -> int | None:
        """Returns the lowest free slot, or None. `reserve` allocates its storage."""
        if not self._free:
            return None
        slot = heapq.heappop(self._free)
        self._used[slot] = 0
        return slot

    def release(self, slot: int, *, poisoned: bool = False) -> None:
        """Free a slot; `poisoned` if it may hold NaN."""
        if poisoned:
            self.spoil(slot)
        self._used.pop(slot, None)
        self.shared.release(slot)
        heapq.heappush(self._free, slot)
        if self.sizes.storage(self._slots, self._columns) > self.limit_bytes // 2:
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
        self._free, self._used = list(range(self._max_slots)), {}
        self._share.forget()
        self.shared.clear()
        self._deallocate()

    def reserve(self, slot: int, columns: int) -> bool:
        """Allocate room for `columns` tokens in every slot in use, `slot` included. Returns False,
        with nothing changed, if the limit forbids it. Kept state is evicted for what is needed now,
        and for all slots within half of the limit, but not for columns of later tokens."""
        if self._slots == self._max_slots and columns <= self._columns:
            self._used[slot] = columns
            return True
        slots = max(self._used) + 1
        if slots <= self._slots and columns <= self._columns:
            self._used[slot] = columns
            return True
        least = max(columns, self._columns)
        doubled = max(self._columns, FIRST_COLUMNS)
        while doubled < columns:
            doubled *= 2
        doubled = min(doubled, max(self._max_columns, columns))
        stepped = min(doubled, _stepped(least))
        fair = self._share.fair
        self._share.take(min(self.sizes.storage(slots, stepped) + self.kept.nbytes, fair))
        found = self._fitting(slots, least, stepped, doubled, fair)
        if found is None:
            if not self._share.take(self.sizes.storage(slots, least) + self.kept.pinned_bytes):
                return False
            found = self._fitting(slots, least, stepped, doubled, fair)
        if found is None:
            return False
        self.emit(Resize(*found, min(slots, self._slots)))
        self._slots, self._columns = found
        self._used[slot] = columns
        return True

    def _fitting(
        self, slots: int, least: int, stepped: int, doubled: int, fair: int
    ) -> tuple[int, int] | None:
        """The size of the storage that the limit allows, with kept state evicted for it. More than
        is needed now is allocated in the fair part of the memory only."""
        limit = self.limit_bytes
        easy = min(limit, fair)
        beside = easy - self.kept.nbytes
        for rows, size, most in (
            (self._max_slots, doubled, beside),
            (self._max_slots, stepped, max(beside, easy // 2)),
            (slots, doubled, beside),
            (slots, stepped, limit),
            (slots, least, limit),
        ):
            needed = self.sizes.storage(rows, size)
            if needed <= most and self._may_have(needed) and self.kept.shrink(limit - needed):
                return rows, size
        return None

    def give_back(self, nbytes: int) -> None:
        """Free so many bytes for other models, or more, of what no sequence needs: idle storage,
        then kept state."""
        before = self.bytes_held
        if not self._used:
            self.trim()
        elif self._storage_needed() < before - self.kept.nbytes:
            self._slots, self._columns = self._shape_needed()
            self.emit(Resize(self._slots, self._columns, self._slots))
        self.kept.evict(max(0, nbytes - (before - self.bytes_held)))

    def begin_plan(self) -> None:
        """A step is planned: which of its sequences lack memory that others have shows anew."""
        self._share.forget()

    def wait_for_others(self, columns: int, since: float, *, blocked: bool) -> bool:
        """Wait for memory of other models, for a sequence that was refused so many columns and has
        come at `since`. `blocked`: no sequence of this model can go on. Returns False if they don't
        have it."""
        slots, most = max(self._used, default=0) + 1, max(columns, *self._used.values(), 0)
        for needed in (self.sizes.storage(slots, most), self.bytes_for_one(columns)):
            if self._may_have(needed) and self._share.want(
                needed + self.kept.pinned_bytes, since, blocked=blocked
            ):
                return True
        return False

    def yields(self, columns: int, since: float) -> bool:
        """True if a sequence of so many columns in the slot that was acquired last leaves the
        memory to an older one of another model."""
        slots, most = max(self._used) + 1, max(columns, *self._used.values())
        return self._share.yields(self.sizes.storage(slots, most), since)

    def is_oldest(self, since: float) -> bool:
        """True if no older sequence of another model waits for memory."""
        return self._share.oldest(since)

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
        """True if a single sequence of `columns` tokens stays below the limit that the model has if
        others give back what they can, beside the pinned bytes, and the device is not known to lack
        the memory."""
        need = self.bytes_for_one(columns)
        return need <= self._share.ceiling - self.kept.pinned_bytes and self._may_have(need)

    def too_large(self, tokens: int) -> JobError:
        """The error of a sequence of so many tokens that never fits."""
        need, pinned = self.bytes_for_one(tokens + 1), self.kept.pinned_bytes
        most = self._share.ceiling
        if self._lacking is not None and need <= most - pinned:
            return no_memory(tokens, self._lacking[1])
        beside = f", of which prompt caches have {size_text(pinned)}" if pinned else ""
        needed, limit = size_texts(need, most)
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

    def _shape_needed(self) -> tuple[int, int]:
        """The slots and columns that sequences need, and one column more for a step in flight."""
        columns = min(_stepped(max(self._used.values()) + 1), self._columns)
        return min(max(self._used) + 1, self._slots), columns

    def _storage_needed(self) -> int:
        return self.sizes.storage(*self._shape_needed()) if self._used else 0

    def _deallocate(self) -> None:
        self.emit(Release())
        self._slots = self._columns = 0


def _stepped(columns: int) -> int:
    """Columns of the storage if it grows in steps."""
    return -(-columns // FIRST_COLUMNS) * FIRST_COLUMNS


def no_memory(tokens: int, fact: str) -> JobError:
    """The error of a sequence of so many tokens for which the device has no memory."""
    return JobError(
        "out_of_memory",
        f"no memory for {counted(tokens, 'token')}: {fact}; shorten the prompt or max_tokens",
    )
