"""The state of the first tokens of a text, outside a store: taken from one, or added to one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from worker.cache.block_keys import BlockKeys
from worker.cache.copies import Copy
from worker.cache.prefix_store import BLOCK, Block, PrefixStore, StateRef

NEWEST_SNAPSHOTS = 2  # taken from a path: the newest ones


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
    copy_of: Callable[[StateRef], Copy | None],
    path: Sequence[bytes],
    token_ids: Sequence[int],
    *,
    snapshots: bool,
) -> PrefixState | None:
    """The state of a path, up to the last snapshot if the model needs `snapshots`; None if it isn't
    in the store any more, or was not saved."""
    blocks: list[Copy] = []
    found: dict[int, Copy] = {}
    end = 0
    for key in path:
        block = store.get(key)
        copy = None if block is None else copy_of(block.state)
        if block is None or copy is None:
            return None
        blocks.append(copy)
        end += block.length
        snapshot = None if block.snapshot is None else copy_of(block.snapshot)
        if snapshot is not None:
            found[end] = snapshot
    if snapshots:
        end = max(found, default=0)
    newest = sorted(found)[-NEWEST_SNAPSHOTS:]
    return (
        PrefixState(
            list(token_ids[:end]), blocks[: -(-end // BLOCK)], {at: found[at] for at in newest}
        )
        if end
        else None
    )


def adopted(block: Block[Copy], adopt: Callable[[Copy], StateRef]) -> Block[StateRef]:
    """A block of a store; `adopt` gives a copy to the device."""
    snapshot = None if block.snapshot is None else adopt(block.snapshot)
    return Block(block.parent, block.length, adopt(block.state), snapshot)


def add(
    store: PrefixStore[StateRef],
    adopt: Callable[[Copy], StateRef],
    state: PrefixState,
    chain: BlockKeys,
    limit: int,
) -> None:
    """Add a state to a store of at most `limit` bytes, if there is room for all of it."""
    blocks = state.as_blocks(chain)
    keys = [*blocks]
    path = keys[: store.known(keys)]
    snapshots: dict[bytes, Copy] = {}
    for key, block in blocks.items():
        known = store.get(key)
        if block.snapshot is not None and (known is None or known.snapshot is None):
            snapshots[key] = block.snapshot
        block.snapshot = None  # attached below
    new = {key: blocks[key] for key in keys[len(path) :]}
    needed = sum(block.nbytes for block in new.values())
    needed += sum(snapshot.nbytes for snapshot in snapshots.values())
    with store.referenced(path):
        if not store.shrink(limit - needed):
            return
        store.extend({key: adopted(block, adopt) for key, block in new.items()})
        store.touch(keys)
        for key, snapshot in snapshots.items():
            if not store.pinned(key):
                store.attach(key, adopt(snapshot))
