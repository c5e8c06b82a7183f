"""The state that the prefix cache keeps, in blocks of at most 16 tokens: keys, references, bytes,
eviction.

A block's key is a hash of its tokens and of the key of the block before it, so a key stands for the
whole text up to the block's end. What its tokens added is in a page of the cache, or in a copy
beside it, or in both. The store knows numbers only: of each page and each copy the number by which
the device finds it (`worker.cache.pool`), and the bytes of copies.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from worker.kernels.attention import PAGE

BLOCK = PAGE  # tokens
MAX_SNAPSHOTS = 64  # kept by one store, not counting provisional ones
MAX_PROVISIONAL = 16


class State(Protocol):
    """A copy of what the tokens of a block added, or a snapshot."""

    @property
    def nbytes(self) -> int: ...


class StateRef(NamedTuple):
    """A copy on the device. No other one ever has its number."""

    number: int
    nbytes: int


Kept = TypeVar("Kept", bound=State)


@dataclass(eq=False, slots=True)
class Block(Generic[Kept]):
    """What `length` tokens added: in a page, or a `copy` of it. `snapshot`: of layers whose state
    at the block's end cannot be put together from blocks."""

    parent: bytes
    length: int
    copy: Kept | None = None
    snapshot: Kept | None = None
    page: int | None = None
    references: int = 0
    tails: set[int] = field(default_factory=set)  # lengths of shorter blocks after this one

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        return sum(one.nbytes for one in self.copies)

    @property
    def copies(self) -> list[Kept]:
        return [one for one in (self.copy, self.snapshot) if one is not None]


class PrefixStore(Generic[Kept]):
    """Owns the blocks. The least recently used are evicted first, and a block never before those
    that continue it; referenced and pinned blocks are not evicted.

    A snapshot is provisional if it was taken where later sequences might begin, until one does.
    Provisional snapshots are few, so that they never displace the others.

    `on_evict` is called with the key of each block before it is evicted, or loses its snapshot;
    `on_drop` with each copy or snapshot that the store does not hold any more, and `on_drop_page`
    with each page.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self.pinned_bytes = 0
        self.on_evict: Callable[[bytes], None] = lambda key: None
        self.on_drop: Callable[[Kept], None] = lambda copy: None
        self.on_drop_page: Callable[[int], None] = lambda page: None
        self._pinned: set[bytes] = set()
        # Least recently used first, and every block before its parent.
        self._blocks: OrderedDict[bytes, Block[Kept]] = OrderedDict()
        # Keys of blocks that have a snapshot, least recently used first.
        self._snapshots: OrderedDict[bytes, None] = OrderedDict()
        self._provisional: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def get(self, key: bytes) -> Block[Kept] | None:
        return self._blocks.get(key)

    def pinned(self, key: bytes) -> bool:
        """True if a block is pinned, and stays until the end. May be called by any thread."""
        return key in self._pinned

    def known(self, keys: Sequence[bytes]) -> int:
        """The number of these keys, which follow each other from the first block on, that are
        stored."""
        return bisect_left(range(len(keys)), True, key=lambda at: keys[at] not in self._blocks)

    @contextmanager
    def referenced(self, keys: Sequence[bytes]) -> Iterator[list[Block[Kept]]]:
        """The blocks of a path from the first one on; meanwhile none of them is evicted."""
        blocks = [self._blocks[key] for key in keys]
        for block in blocks:
            block.references += 1
        try:
            yield blocks
        finally:
            for block in blocks:
                block.references -= 1

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark a path from the first block on as used."""
        for key in reversed(keys):
            self._blocks.move_to_end(key)
        for snapshots in (self._snapshots, self._provisional):
            if keys and keys[-1] in snapshots:
                snapshots.move_to_end(keys[-1])

    def extend(self, blocks: Mapping[bytes, Block[Kept]]) -> None:
        """Add blocks, each after its parent. Touch their path before anything is evicted."""
        for key, block in blocks.items():
            self._blocks[key] = block
            self.nbytes += block.nbytes
            if block.length < BLOCK:
                self._blocks[block.parent].tails.add(block.length)

    def attach(self, key: bytes, snapshot: Kept, *, provisional: bool = False) -> None:
        """Add a snapshot to a block that has none."""
        block = self._blocks[key]
        block.snapshot = snapshot
        self.nbytes += snapshot.nbytes
        (self._provisional if provisional else self._snapshots)[key] = None
        self._limit_snapshots()

    def confirm(self, key: bytes) -> None:
        """Keep the snapshot of a block like the others if it was provisional."""
        if key in self._provisional:
            del self._provisional[key]
            self._snapshots[key] = None
            self._limit_snapshots()

    def room_for_provisional(self, nbytes: int, limit: int) -> bool:
        """True if `limit` allows a provisional snapshot of so many bytes. The least recently used
        ones are evicted for it."""
        if nbytes > limit:
            return False
        sizes = {key: self._snapshot_bytes(key) for key in self._provisional}
        held = sum(sizes.values())
        for key, size in sizes.items():
            if held + nbytes > limit and not self._blocks[key].references:
                self._remove_snapshot(key)
                held -= size
        return held + nbytes <= limit

    def pin(self, blocks: Mapping[bytes, Block[Kept]]) -> None:
        """Add blocks, each after its parent, that stay until the end with their snapshots. They
        replace those that are kept already, except pinned ones."""
        for key, block in blocks.items():
            old = self._blocks.get(key)
            if key in self._pinned and old is not None:
                if old.snapshot is None and block.snapshot is not None:
                    old.snapshot, block.snapshot = block.snapshot, None
                    self.nbytes += old.snapshot.nbytes
                    self.pinned_bytes += old.snapshot.nbytes
                self._drop_state(block)
                continue
            if old is not None:
                block.tails |= old.tails
                self.nbytes -= old.nbytes
                self._forget_snapshot(key)
                self._drop_state(old)
            self.extend({key: block})
            block.references += 1
            self._pinned.add(key)
            self.pinned_bytes += block.nbytes

    def shrink(self, limit: int) -> bool:
        """Evict snapshots until at most `limit` bytes are kept. Returns False, with nothing
        changed, if references prevent it."""
        if self.nbytes <= limit:
            return True
        victims, left = [], self.nbytes
        for key, block in self._blocks.items():
            if left <= limit:
                break
            if block.snapshot is not None and not block.references:
                victims.append(key)
                left -= block.snapshot.nbytes
        if left > limit:
            return False
        for key in victims:
            self._remove_snapshot(key)
        return True

    def evict(self, nbytes: int) -> int:
        """Evict up to so many bytes, or all that nothing refers to. Returns how many."""
        before = self.nbytes
        held = sum(block.nbytes for block in self._blocks.values() if block.references)
        self.shrink(max(before - nbytes, held))
        return before - self.nbytes

    def evict_pages(self, count: int, in_slot: Callable[[int], bool], *, most: int = 0) -> bool:
        """Evict until so many pages are free that no slot has, or `most` if that is more and they
        are there. Returns False, with nothing changed, if they are too few."""
        victims, free = self._victims(count, max(count, most), in_slot)
        if free < count:
            return False
        self._evict_pages(victims)
        return True

    def evict_some(self, count: int, in_slot: Callable[[int], bool]) -> None:
        """Evict up to so many pages that no slot has."""
        self._evict_pages(self._victims(count, count, in_slot)[0])

    def _evict_pages(self, victims: Iterable[bytes]) -> None:
        for key in victims:
            if key in self._pinned:  # which has a copy
                self._drop_page(self._blocks[key])
            else:
                self.on_evict(key)
                self._remove(key)

    def _victims(
        self, least: int, most: int, in_slot: Callable[[int], bool]
    ) -> tuple[list[bytes], int]:
        """The keys of blocks to evict, each before its parent, and the number of pages that are
        free then: up to `most`. The least recently used ones that have no page in a slot; where
        these are less than `least`, also blocks that continue others and have: their slots keep
        the page."""
        found, free = self._evictable(most, in_slot, whole=False)
        if len(free) < least:
            found, free = self._evictable(least, in_slot, whole=True)
        gone = {*free}
        for key in reversed(found):
            if self._blocks[key].parent in gone:
                gone.add(key)
        return [key for key in found if key in gone], len(free)

    def _evictable(
        self, count: int, in_slot: Callable[[int], bool], *, whole: bool
    ) -> tuple[list[bytes], list[bytes]]:
        """The keys of blocks that can be evicted, `whole`: with those in slots, until `count` of
        them have a page that is free then; and the keys of these."""
        found: list[bytes] = []
        free: list[bytes] = []
        stay: set[bytes] = set()  # what blocks that stay continue
        for key, block in self._blocks.items():
            if len(free) == count:
                break
            pinned = key in self._pinned
            may_go = block.references == pinned and (pinned or key not in stay)
            frees = may_go and block.page is not None and not in_slot(block.page)
            goes = frees or (may_go and whole and not pinned)
            if frees:
                free.append(key)
            if goes:
                found.append(key)
            if pinned or not goes:
                stay.add(block.parent)
        return found, free

    def drop(self, keys: Sequence[bytes]) -> None:
        """Remove blocks, and all that continue them, but no pinned ones."""
        dropped = set(keys) - self._pinned
        for key in [*reversed(self._blocks)]:  # every block after its parent
            if key in self._pinned:
                continue
            if key in dropped or self._blocks[key].parent in dropped:
                dropped.add(key)
                self._remove(key)

    def keep_pinned(self) -> list[Kept]:
        """Drop all but pinned blocks, whatever an interrupted change has left. Returns the copies
        that are left, and tells `on_drop` nothing."""
        for key in self._blocks.keys() - self._pinned:
            self._drop_page(self._blocks[key])
        order = (key for key in self._blocks if key in self._pinned)
        blocks = OrderedDict((key, self._blocks[key]) for key in order)
        for block in blocks.values():
            block.references = 1
            block.tails.clear()
        for block in blocks.values():
            if block.length < BLOCK and block.parent in blocks:
                blocks[block.parent].tails.add(block.length)
        self._blocks = blocks
        self._snapshots.clear()
        self._provisional.clear()
        self.nbytes = self.pinned_bytes = sum(block.nbytes for block in blocks.values())
        return [one for block in blocks.values() for one in block.copies]

    def clear(self) -> None:
        for block in self._blocks.values():
            self._drop_state(block)
        self._blocks.clear()
        self._snapshots.clear()
        self._provisional.clear()
        self._pinned.clear()
        self.nbytes = self.pinned_bytes = 0

    def _remove(self, key: bytes) -> None:
        block = self._blocks.pop(key)
        assert not block.references
        self._forget_snapshot(key)
        self.nbytes -= block.nbytes
        self._drop_state(block)

    def _drop_state(self, block: Block[Kept]) -> None:
        self._drop_page(block)
        for one in block.copies:
            self.on_drop(one)

    def _drop_page(self, block: Block[Kept]) -> None:
        if block.page is not None:
            self.on_drop_page(block.page)
            block.page = None

    def _snapshot_bytes(self, key: bytes) -> int:
        snapshot = self._blocks[key].snapshot
        return 0 if snapshot is None else snapshot.nbytes

    def _remove_snapshot(self, key: bytes) -> None:
        self.on_evict(key)
        block = self._blocks[key]
        if block.length < BLOCK:  # without its snapshot nothing can begin there
            self._remove(key)
            return
        if block.snapshot is not None:
            self.nbytes -= block.snapshot.nbytes
            self.on_drop(block.snapshot)
        block.snapshot = None
        self._forget_snapshot(key)

    def _forget_snapshot(self, key: bytes) -> None:
        self._snapshots.pop(key, None)
        self._provisional.pop(key, None)

    def _limit_snapshots(self) -> None:
        for snapshots, most in (
            (self._snapshots, MAX_SNAPSHOTS),
            (self._provisional, MAX_PROVISIONAL),
        ):
            for oldest in [*snapshots][: max(0, len(snapshots) - most)]:
                if not self._blocks[oldest].references:
                    self._remove_snapshot(oldest)
