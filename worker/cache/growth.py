"""The sizes that the storage of a model's caches may grow to, in the order in which they are tried.

Storage doubles as long as the share of the model allows it. Otherwise the least recently used kept
pages give way, and where these are too few, storage grows by what is needed, and by an eighth, so
that it is not copied again soon. A sequence that is alone gets what it needs and no more, where all
else takes too much.

It knows numbers only, and changes nothing. A size with fewer pages than are needed is one for which
kept pages give way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from worker.cache.sizes import CacheSizes
from worker.layers.cache import Size, pages_for

FIRST_COLUMNS = 256  # tokens per slot in the first allocation
MORE = 8  # one page of this many is allocated in addition where that evicts kept state


class Room(NamedTuple):
    """Bytes that the storage, and the copies and snapshots beside it, may take together."""

    limit: int
    fair: int  # of these, for more than what is needed now
    storage: int  # that storage may take of them: the device is known to lack more
    kept: int  # that copies and snapshots take
    pinned: int  # of these, that do not give way


class Growth:
    """The sizes of one model's storage. `max_columns`: tokens of its longest sequence."""

    def __init__(self, sizes: CacheSizes, *, max_slots: int, max_columns: int) -> None:
        self._sizes = sizes
        self._max_slots, self._max_columns = max_slots, max_columns
        self._max_pages = max_slots * pages_for(max_columns)  # that slots may have
        self._page = sizes.storage(Size(0, 0, 1))  # bytes

    def stepped(self, size: Size, needed: Size) -> Size:
        """What is needed beside what is there, with columns that grow in steps."""
        least = self._least(size, needed)
        doubled = self._doubled(size, least)
        return least._replace(columns=min(doubled.columns, in_steps(least.columns)))

    def attempts(self, size: Size, needed: Size, room: Room) -> Iterator[Size]:
        """The sizes to try if `needed` is more than `size`, which is allocated."""
        least, stepped = self._least(size, needed), self.stepped(size, needed)
        yield from self._freely(size, least, stepped, room)
        if least._replace(pages=size.pages) == size:
            yield size
        yield from self.forced(size, stepped, room)
        yield from self.forced(size, least, room)

    def forced(self, size: Size, wanted: Size, room: Room) -> Iterator[Size]:
        """A size with an eighth more pages than are wanted, or as many as there is room for; no
        fewer than are there."""
        limit = room.limit - room.pinned
        larger = self._more(size, wanted, limit)
        if self._sizes.storage(larger) <= min(limit, room.storage):
            yield larger

    def exact(self, needed: Size, room: Room) -> Iterator[Size]:
        """What is needed, and no page more."""
        limit = min(room.limit - room.pinned, room.storage)
        most = max(self._max_columns, needed.columns)
        for columns in (min(in_steps(needed.columns), most), needed.columns):
            exact = needed._replace(columns=columns)
            if self._sizes.storage(exact) <= limit:
                yield exact

    def _freely(self, size: Size, least: Size, stepped: Size, room: Room) -> Iterator[Size]:
        """More than is needed now, for which no page gives way, and snapshots within half of the
        limit only: twice as much in the fair part of the memory, or else an eighth more. Snapshots
        have the other half."""
        most = room.limit
        if self._sizes.needs_snapshots:
            most = max(room.limit // 2, self._sizes.storage(size))
        easy = min(room.limit, room.fair, most)
        beside, rest = easy - room.kept, most - room.kept
        doubled = self._doubled(size, least)
        everywhere = doubled._replace(slots=self._max_slots)
        tried = [
            (everywhere, beside),
            (everywhere._replace(columns=stepped.columns), max(beside, easy // 2)),
            (doubled, beside),
        ]
        larger = self._more(size, stepped, rest)
        if larger.pages >= least.pages:
            tried.append((larger, rest))
        for wanted, limit in tried:
            if self._sizes.storage(wanted) <= min(limit, room.storage):
                yield wanted

    def _least(self, size: Size, needed: Size) -> Size:
        """What is needed beside what is there."""
        slots, columns = max(size.slots, needed.slots), max(size.columns, needed.columns)
        return Size(slots, columns, max(size.pages, self._bounded(needed.pages)))

    def _doubled(self, size: Size, least: Size) -> Size:
        """A size of at least this, with columns and pages that double, for less growth later."""
        columns = max(size.columns, FIRST_COLUMNS)
        while columns < least.columns:
            columns *= 2
        columns = min(columns, max(self._max_columns, least.columns))
        pages = max(size.pages, self._max_slots * pages_for(FIRST_COLUMNS))
        while pages < least.pages:
            pages *= 2
        # What is kept beside the pages of slots grows by an eighth, so that it is seldom copied.
        most = max(self._max_pages, self._bounded(least.pages + least.pages // MORE))
        return Size(least.slots, columns, min(pages, most))

    def _more(self, size: Size, wanted: Size, limit: int) -> Size:
        """A size with more pages, or with as many as the limit has room for."""
        rest = limit - self._sizes.storage(wanted._replace(pages=0))
        pages = min(wanted.pages + wanted.pages // MORE, rest // self._page)
        return wanted._replace(pages=max(size.pages, self._bounded(pages)))

    def _bounded(self, pages: int) -> int:
        """No more pages than slots may have, if no layer has any: then a page is a block in the
        memory of the host alone, which is of use only before one of the few snapshots."""
        return pages if self._sizes.has_pages else min(pages, self._max_pages)


def in_steps(columns: int) -> int:
    """Columns of storage that grows in steps."""
    return -(-columns // FIRST_COLUMNS) * FIRST_COLUMNS
