"""Saves the state of one prompt while it is computed, to be written to a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from worker.cache.book import CacheBook
from worker.cache.changes import Drop, SaveBlocks, SaveSnapshot
from worker.cache.copies import Copy
from worker.cache.prefix_state import PrefixState
from worker.cache.prefix_store import BLOCK, StateRef


class StateSaver:
    """Keeps all blocks of a prompt beside the prefix store. If the model needs snapshots, there is
    one at the end and one at the last multiple of `stride`, where a batch of one can use it.
    Belongs to the thread that steps the engine."""

    def __init__(self, book: CacheBook, token_ids: Sequence[int], stride: int) -> None:
        self.stride = stride  # the prompt is computed in pieces of so many tokens
        self._book, self._token_ids = book, [*token_ids]
        self._blocks: list[StateRef] = []
        self._snapshots: dict[int, StateRef] = {}

    def keep(self, slot: int, end: int) -> None:
        """Keep what is wanted of a slot that has computed the first `end` tokens."""
        count, sizes = len(self._token_ids), self._book.sizes
        if sizes.needs_snapshots and end in (count, count // self.stride * self.stride):
            state = self._snapshots[end] = self._new_copy(sizes.snapshot(end))
            self._book.emit(SaveSnapshot(slot, end, state.number))
        if end == count:
            each = sizes.blocks(BLOCK)
            self._blocks = [self._new_copy(each) for _ in range(0, count, BLOCK)]
            numbers = tuple([state.number for state in self._blocks])
            self._book.emit(SaveBlocks(slot, 0, count, numbers))

    def restart(self) -> None:
        """Begin anew: nothing that was kept stays."""
        self._book.saved -= {state.number for state in self._states()}
        self._blocks, self._snapshots = [], {}

    def take(self, copy_of: Callable[[StateRef], Copy | None]) -> PrefixState | None:
        """The state of a prompt that was computed; None if there was no memory to keep it."""
        blocks = [copy_of(state) for state in self._blocks]
        snapshots = {end: copy_of(state) for end, state in self._snapshots.items()}
        whole = [copy for copy in blocks if copy is not None]
        found = {end: copy for end, copy in snapshots.items() if copy is not None}
        if not whole or len(whole) < len(blocks) or len(found) < len(snapshots):
            return None
        return PrefixState([*self._token_ids], whole, found)

    def drop(self) -> None:
        """Keep nothing any more."""
        for state in self._states():
            self._book.emit(Drop(state.number))
        self.restart()

    def _new_copy(self, nbytes: int) -> StateRef:
        state = self._book.new_copy(nbytes)
        self._book.saved.add(state.number)
        return state

    def _states(self) -> list[StateRef]:
        return [*self._blocks, *self._snapshots.values()]
