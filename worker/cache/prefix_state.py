"""The state of the first tokens of a text, outside a store: taken from one, or added to one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from worker.cache.block_keys import BlockKeys
from worker.cache.book import CacheBook
from worker.cache.copies import Copy
from worker.cache.prefix_store import BLOCK, Block, PrefixStore, StateRef

NEWEST_SNAPSHOTS = 2  # taken from a path: the newest ones


class Tensors(Protocol):
    """Knows the tensors of what is kept."""

    def copy_of(self, copy: StateRef) -> Copy | None:
        """Those of a copy or snapshot; None if it was not saved, or not yet."""

    def copies_of_pages(self, pages: Sequence[int], tokens: int) -> list[Copy]:
        """A copy of each page of so many tokens; the last one may have fewer than the others."""


@dataclass(frozen=True)
class PrefixState:
    """`blocks`: a copy per BLOCK tokens, of which the last may have fewer; `snapshots`: by the
    number of tokens that they are after."""

    token_ids: list[int]
    blocks: list[Copy]
    snapshots: dict[int, Copy] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in (*self.blocks, *self.snapshots.values()))

    def as_blocks(self, chain: BlockKeys) -> dict[bytes, Block[Copy]]:
        """The blocks of a store, by their keys in the chain of these tokens."""
        count = len(self.token_ids)
        chain.extend(self._tokens, count // BLOCK)
        blocks = {}
        for number, state in enumerate(self.blocks):
            start, end = number * BLOCK, min(count, (number + 1) * BLOCK)
            key = chain.key(number, self.token_ids[start:end])
            snapshot = self.snapshots.get(end)
            blocks[key] = Block(chain.parent(number), end - start, state, snapshot)
        return blocks

    def _tokens(self, start: int, end: int) -> list[int]:
        return self.token_ids[start:end]


def take(
    store: PrefixStore[StateRef],
    tensors: Tensors,
    path: Sequence[bytes],
    token_ids: Sequence[int],
    *,
    snapshots: bool,
) -> PrefixState | None:
    """The state of a path, up to the last snapshot if the model needs `snapshots`; None if it isn't
    in the store any more, or was not saved."""
    known = [store.get(key) for key in path]
    blocks = [block for block in known if block is not None]
    if len(blocks) < len(known):
        return None
    copies = _copies(blocks, tensors)
    if copies is None:
        return None
    found: dict[int, Copy] = {}
    end = 0
    for block in blocks:
        end += block.length
        snapshot = None if block.snapshot is None else tensors.copy_of(block.snapshot)
        if snapshot is not None:
            found[end] = snapshot
    if snapshots:
        end = max(found, default=0)
    newest = sorted(found)[-NEWEST_SNAPSHOTS:]
    return (
        PrefixState(
            list(token_ids[:end]), copies[: -(-end // BLOCK)], {at: found[at] for at in newest}
        )
        if end
        else None
    )


def _copies(blocks: Sequence[Block[StateRef]], tensors: Tensors) -> list[Copy] | None:
    """A copy of each block of a path; None if one is not there."""
    in_pages = [block for block in blocks if block.copy is None]
    pages = [block.page for block in in_pages if block.page is not None]
    if len(pages) < len(in_pages):
        return None
    tokens = sum(block.length for block in in_pages)
    read = iter(tensors.copies_of_pages(pages, tokens) if pages else ())
    copies = [next(read) if block.copy is None else tensors.copy_of(block.copy) for block in blocks]
    found = [copy for copy in copies if copy is not None]
    return found if len(found) == len(copies) else None


Adopt = Callable[[Copy], StateRef]  # gives a copy to the device


def pinnable(block: Block[Copy], adopt: Adopt) -> Block[StateRef]:
    """A block of a store, which keeps its copy."""
    assert block.copy is not None
    snapshot = None if block.snapshot is None else adopt(block.snapshot)
    return Block(block.parent, block.length, adopt(block.copy), snapshot)


def add(book: CacheBook, adopt: Adopt, state: PrefixState, chain: BlockKeys) -> None:
    """Keep a state, in pages, if there is room for all of it."""
    store, blocks = book.kept, state.as_blocks(chain)
    keys = [*blocks]
    path = keys[: store.known(keys)]
    new = keys[len(path) :]
    snapshots: dict[bytes, Copy] = {}
    for key, block in blocks.items():
        known = store.get(key)
        if block.snapshot is not None and (known is None or known.snapshot is None):
            snapshots[key] = block.snapshot
    needed = sum(snapshot.nbytes for snapshot in snapshots.values())
    with store.referenced(path):
        if not book.have_pages(len(new)) or not store.shrink(book.room_for(needed) - needed):
            return
        kept: dict[bytes, Block[StateRef]] = {
            key: Block(blocks[key].parent, blocks[key].length) for key in new
        }
        store.extend(kept)
        book.fill_pages((kept[key], adopt(_copy(blocks[key]))) for key in new)
        store.touch(keys)
        for key, snapshot in snapshots.items():
            if not store.pinned(key):
                store.attach(key, adopt(snapshot))


def _copy(block: Block[Copy]) -> Copy:
    assert block.copy is not None
    return block.copy
