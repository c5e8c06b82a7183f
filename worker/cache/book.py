"""The numbers of a model's KV cache: slots, pages and bytes, within its share of the memory.

Each sequence occupies one slot, and pages for the tokens that it has: of the caches of every layer,
of the model and of its draft if it has one. A page stays when its slot is released, if the store of
prefixes keeps it. Sequences that begin with kept pages share them. Where no page is free, storage
grows, or kept pages are evicted: `worker.cache.growth` says to which sizes. Copies and snapshots
have the rest of the limit. When other models need memory, `give_back` shrinks all to what sequences
use.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from itertools import count, groupby

from jobs.errors import JobError
from jobs.sizes import counted, size_text, size_texts
from worker.cache.changes import (
    Begin,
    CacheChange,
    CopyPage,
    Drop,
    Fill,
    Load,
    Place,
    Release,
    Resize,
)
from worker.cache.growth import Growth, Room, in_steps
from worker.cache.page_numbers import PageNumbers, Row
from worker.cache.prefix_store import BLOCK, Block, PrefixStore, StateRef
from worker.cache.sizes import CacheSizes
from worker.cache_memory import CacheShare
from worker.layers.cache import Size, pages_for

MOSTLY_FREE = 4  # one page of this many, or fewer, is used
NOTHING = Size(0, 0, 0)


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
        self.kept.on_drop = lambda copy: self.emit(Drop(copy.number))
        self._pages = PageNumbers()
        self.kept.on_drop_page = self._pages.drop
        self.saved: set[int] = set()  # numbers of copies beside the store, which stay as well
        self._share = share
        self._max_slots = max_slots
        self._growth = Growth(sizes, max_slots=max_slots, max_columns=max_columns)
        self._free = list(range(max_slots))
        self._used: dict[int, int] = {}  # the columns that each slot in use needs
        self._size = NOTHING  # allocated
        self._lacking: tuple[int, str] | None = None  # bytes that the device lacked, and its words
        self._numbers = count()

    def emit(self, change: CacheChange) -> None:
        """Have the device make a change, after those before it."""
        self._changes.append(change)

    def take_changes(self) -> tuple[CacheChange, ...]:
        """The changes that the device has to make next."""
        changes: list[CacheChange] = []
        for is_place, group in groupby(self._changes, lambda change: isinstance(change, Place)):
            if is_place:  # one write to the table for all sequences that begin in a step
                rows = [row for one in group if isinstance(one, Place) for row in one.rows]
                pages = {(slot, number): page for slot, number, page in rows}
                changes.append(Place(tuple((*key, page) for key, page in pages.items())))
            else:
                changes += group
        self._changes.clear()
        return tuple(changes)

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
        return self.sizes.storage(self._size) + self.kept.nbytes

    @property
    def bytes_beside(self) -> int:
        """Bytes that copies and snapshots may take beside the storage."""
        return self.limit_bytes - self.sizes.storage(self._size)

    def room_for(self, nbytes: int) -> int:
        """`bytes_beside`, after other models have given back what they don't need for so many more
        bytes of it, up to this model's fair part."""
        self._share.take(min(self.bytes_held + nbytes, self._share.fair))
        return self.bytes_beside

    def new_copy(self, nbytes: int) -> StateRef:
        """The number of a copy that will be kept, and its bytes."""
        return StateRef(next(self._numbers), nbytes)

    def acquire(self) -> int | None:
        """Returns the lowest free slot, or None. `reserve` allocates its storage."""
        if not self._free:
            return None
        slot = heapq.heappop(self._free)
        self._used[slot] = 0
        return slot

    def release(self, slot: int) -> None:
        """Free a slot, and its pages."""
        self._used.pop(slot, None)
        self._pages.release(slot)
        heapq.heappush(self._free, slot)
        held = self.sizes.storage(self._size)
        if not self._used and held > self.limit_bytes // 2:
            least = Size(0, 0, self._size.pages if self._pages.used else 0)
            if self.sizes.storage(least) < held:  # one long sequence may need what slots have
                self._shrink(least)

    def trim(self) -> None:
        """Free the storage of slots, unless one is in use, and that of pages if most are free:
        those that are kept are copied."""
        if not self._used and self._size != NOTHING:
            few = self._pages.used <= self._size.pages // MOSTLY_FREE
            self._shrink(Size(0, 0, self._pages.used if few else self._size.pages))

    def free_all(self) -> None:
        """Free every slot and the storage, whatever uses them or was interrupted. Changes that are
        not made yet are void."""
        self._changes.clear()
        self._free, self._used = list(range(self._max_slots)), {}
        self._share.forget()
        self._deallocate()

    def reserve(self, slot: int, columns: int) -> bool:
        """Give a slot in use pages for `columns` tokens. Returns False, with nothing changed, if
        the limit forbids it."""
        missing = self._pages.missing(slot, columns)
        enough = not missing and slot < self._size.slots and columns <= self._size.columns
        if not (enough or self._have(columns, missing) or self._have_alone(columns, missing)):
            return False
        if missing:
            self.emit(Place(tuple(self._pages.take(slot, [None] * missing))))
        self._used[slot] = columns
        return True

    def begin_with(self, slot: int, blocks: Sequence[Block[StateRef]], columns: int) -> bool:
        """As `reserve`, for a slot without pages that gets what these kept blocks hold, of which
        nothing is evicted meanwhile. Whole blocks share their page; a last one that is shorter is
        copied, since the sequence goes on there."""
        whole = [block for block in blocks if block.length == BLOCK]
        pages: list[int | None] = [block.page for block in whole]
        pages += [None] * (pages_for(columns) - len(pages))
        if not self._have(columns, pages.count(None)):
            return False
        rows = self._pages.take(slot, pages)
        self.emit(Place(tuple(rows)))
        self._used[slot] = columns
        filled = []
        for block, (_, _, page) in zip(blocks, rows, strict=False):
            if block.page is None:
                assert block.copy is not None
                filled.append((page, block.copy.number))
            elif block.page != page:
                self.emit(CopyPage(block.page, page))
        if filled:
            self.emit(Fill(tuple(filled)))
        for block, (_, _, page) in zip(whole, rows, strict=False):
            if block.page is None:
                self._pages.keep(page, block)
        snapshot = blocks[-1].snapshot
        if snapshot is not None:
            end = sum(block.length for block in blocks)
            self.emit(Load(slot, snapshot.number, end))
        return True

    def extend(self, needed: Sequence[tuple[int, int]]) -> bool:
        """Give each of these slots pages for so many tokens, of those that are free. Returns False,
        with nothing changed, if they are too few."""
        if any(columns > self._size.columns for _, columns in needed):
            return False
        missing = self._pages.lacking(needed)
        if sum(missing.values()) > self._pages.free:
            return False
        self._used |= dict(needed)
        rows = [
            row
            for slot, number in missing.items()
            for row in self._pages.take(slot, [None] * number)
        ]
        if rows:
            self.emit(Place(tuple(rows)))
        return True

    def keep_pages(self, slot: int, first: int, blocks: Iterable[Block[StateRef]]) -> None:
        """Keep the pages of a slot from number `first` on: each for a block."""
        for page, block in zip(self._pages.of(slot)[first:], blocks, strict=False):
            self._pages.keep(page, block)

    def fill_pages(self, copies: Iterable[tuple[Block[StateRef], StateRef]]) -> None:
        """Give blocks free pages, which `have_pages` has found, with what copies hold."""
        rows = []
        for block, copy in copies:
            page = self._pages.take_free()
            self._pages.keep(page, block)
            rows.append((page, copy.number))
        if rows:
            self.emit(Fill(tuple(rows)))
        for _, number in rows:
            self.emit(Drop(number))

    def have_pages(self, count: int) -> bool:
        """Have so many free pages, if the limit allows them."""
        return self._have(0, count)

    def _have(self, columns: int, count: int) -> bool:
        """Have storage for `columns` tokens in each slot in use, and so many free pages. Returns
        False, with nothing changed, if the limit forbids it."""
        size, growth = self._size, self._growth
        in_use = max(self._used, default=-1) + 1
        slots = size.slots if size.slots == self._max_slots else in_use
        needed = Size(slots, columns, self._pages.used + count)
        if all(has >= need for has, need in zip(size, needed, strict=True)):
            return True
        stepped, fair = growth.stepped(size, needed), self._share.fair
        self._share.take(min(self.sizes.storage(stepped) + self.kept.nbytes, fair))
        if self._have_one(growth.attempts(size, needed, self._room()), needed.pages):
            return True
        # Without the rows of slots that were in use.
        columns, pages = max(size.columns, columns), max(size.pages, needed.pages)
        fewer = Size(in_use, columns, pages)
        return self._share.take(self.sizes.storage(fewer) + self.kept.pinned_bytes) and (
            self._have_one(growth.forced(size, fewer, self._room()), needed.pages)
        )

    def _have_alone(self, columns: int, count: int) -> bool:
        """As `_have`, if one slot is in use: all that is kept gives way to it. Whatever fits alone
        in the lowest slot thus gets its storage."""
        if len(self._used) > 1:
            return False
        needed = Size(max(self._used) + 1, columns, self._pages.in_slots + count)
        self._share.take(self.sizes.storage(needed) + self.kept.pinned_bytes)
        size = next(self._growth.exact(needed, self._room()), None)
        if size is None:
            return False
        self.kept.evict_some(len(self.kept), lambda page: False)
        self._allocate(size)
        return True

    def _room(self) -> Room:
        limit, kept = self.limit_bytes, self.kept
        storage = limit if self._lacking is None else min(limit, self._lacking[0] - 1)
        return Room(limit, self._share.fair, storage, kept.nbytes, kept.pinned_bytes)

    def _have_one(self, sizes: Iterable[Size], pages: int) -> bool:
        """Have the first of these sizes that what is kept gives way to, so that so many pages are
        enough. Returns False if there is none."""
        return any(self._have_size(size, pages - size.pages) for size in sizes)

    def _have_size(self, size: Size, lacking: int) -> bool:
        """Have this size, with so many kept pages evicted, and snapshots."""
        if lacking > 0 and not self._evict(lacking):
            return False
        if size != self._size:
            if not self.kept.shrink(self.limit_bytes - self.sizes.storage(size)):
                return False
            self._allocate(size)
        return True

    def _evict(self, pages: int) -> bool:
        """Evict kept pages: where there are enough, one for each slot in use, so that the store is
        not searched for each that their next tokens need. Returns False, with nothing changed, if
        they are too few."""
        idle, in_slot = self._pages.used - self._pages.in_slots, self._pages.in_slot
        return pages <= idle and self.kept.evict_pages(pages, in_slot, most=len(self._used))

    def _shrink(self, size: Size) -> None:
        """Allocate less, but no fewer pages than are used."""
        if size.pages == 0 == size.slots:
            self._deallocate()
        else:
            self._allocate(size)

    def _allocate(self, size: Size) -> None:
        """Allocate this size, with no fewer pages than are used. They move to lower numbers if it
        has fewer than there are."""
        moves: list[tuple[int, int]] = []
        rows: list[Row] = []
        if size.pages < self._size.pages:
            moves, rows = self._pages.shrink(size.pages)
        else:
            self._pages.grow(size.pages)
        shrinks = self.sizes.storage(size) < self.sizes.storage(self._size)
        self.emit(Resize(size, min(size.slots, self._size.slots), tuple(moves), shrinks))
        self._size = size
        if rows:
            self.emit(Place(tuple(rows)))

    def give_back(self, nbytes: int) -> int:
        """Free so many bytes for other models, or more, of what no sequence needs: idle storage,
        then what is kept. Returns how many."""
        before = self.bytes_held
        idle = self.sizes.storage(self._size) - self.sizes.storage(self._size_needed())
        lacking = nbytes - idle
        page = self.sizes.storage(Size(0, 0, 1))
        if lacking > 0 and page:
            most = self._pages.used - self._pages.in_slots
            self.kept.evict_some(min(most, -(-lacking // page)), self._pages.in_slot)
        idle = self.sizes.storage(self._size) - self.sizes.storage(self._size_needed())
        # Before pages move: whoever is told what is evicted reads it where it is.
        self.kept.evict(max(0, nbytes - idle - (before - self.bytes_held)))
        needed = self._size_needed()
        if self.sizes.storage(needed) < self.sizes.storage(self._size):
            self._shrink(needed)
        return before - self.bytes_held

    def leave_room(self) -> None:
        """Leave snapshots their half of the limit again, if sequences needed more and now need
        clearly less."""
        half, held = self.limit_bytes // 2, self.sizes.storage(self._size)
        if self.sizes.needs_snapshots and held > half and self._storage_needed() <= half * 3 // 4:
            self.give_back(held - half)

    def begin_plan(self) -> None:
        """A step is planned: which of its sequences lack memory that others have shows anew."""
        self._share.forget()

    def wait_for_others(self, columns: int, since: float, *, blocked: bool) -> bool:
        """Wait for memory of other models, for a sequence that was refused so many columns and has
        come at `since`. `blocked`: no sequence of this model can go on. Returns False if they don't
        have it."""
        for needed in (self._bytes_with(columns), self.bytes_for_one(columns)):
            if self._may_have(needed) and self._share.want(
                needed + self.kept.pinned_bytes, since, blocked=blocked
            ):
                return True
        return False

    def yields(self, columns: int, since: float) -> bool:
        """True if a sequence of so many columns in the slot that was acquired last leaves the
        memory to an older one of another model."""
        return self._share.yields(self._bytes_with(columns), since)

    def is_oldest(self, since: float) -> bool:
        """True if no older sequence of another model waits for memory."""
        return self._share.oldest(since)

    def resize_failed(self, resize: Resize, fact: str) -> None:
        """Allocate less than this from now on: the device has no memory for it, as `fact` says."""
        self._lacking = self.sizes.storage(resize.size), fact

    def forget_failure(self) -> None:
        """Allocate as much as the limit allows again."""
        self._lacking = None

    def begin(self, slot: int) -> None:
        """Prepare `slot` for a new sequence."""
        if self.sizes.needs_clearing:
            self.emit(Begin(slot))

    def bytes_for_one(self, columns: int) -> int:
        """Bytes needed by a single sequence of `columns` tokens."""
        return self.sizes.sequence(columns)

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

    def _bytes_with(self, columns: int) -> int:
        """Bytes that the sequences in slots need with one more of so many tokens."""
        most = max(columns, *self._used.values(), 0)
        pages = self._pages.in_slots + pages_for(columns)
        return self.sizes.storage(Size(max(self._used, default=0) + 1, most, pages))

    def _size_needed(self) -> Size:
        """The size that sequences and kept pages need, with one column more for a step in
        flight."""
        if not self._used:
            return Size(0, 0, self._pages.used)
        columns = min(in_steps(max(self._used.values()) + 1), self._size.columns)
        return Size(min(max(self._used) + 1, self._size.slots), columns, self._pages.used)

    def _storage_needed(self) -> int:
        """Bytes that sequences need."""
        return self.sizes.storage(self._size_needed()._replace(pages=self._pages.in_slots))

    def _deallocate(self) -> None:
        self.emit(Release())
        self._pages.clear()
        self._size = NOTHING


def no_memory(tokens: int, fact: str) -> JobError:
    """The error of a sequence of so many tokens for which the device has no memory."""
    return JobError(
        "out_of_memory",
        f"no memory for {counted(tokens, 'token')}: {fact}; shorten the prompt or max_tokens",
    )
