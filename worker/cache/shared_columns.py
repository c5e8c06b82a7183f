"""Finds slots that begin with the same state, so that attention reads it from one of them.

A batch of sequences with a common beginning then reads that from memory once per step, not once per
sequence. The slots hold copies of the same blocks, so this changes no bit of the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from worker.cache.changes import Share
from worker.cache.prefix_store import BLOCK, Block

Branches = dict[int, "Node"]
Node = tuple[
    int, Branches
]  # the lowest slot that holds a block after those before it; what follows


class SharedColumns:
    """Knows which blocks each slot begins with. `emit` gets what attention reads from other slots
    when it changes."""

    def __init__(self, slots: int, emit: Callable[[Share], None]) -> None:
        self._slots, self._emit = slots, emit
        self._held: dict[int, list[int]] = {}  # numbers of the blocks that a slot begins with
        self._changed = False

    def hold(self, slot: int, blocks: Sequence[Block[Any]]) -> None:
        """A slot begins with copies of these blocks."""
        self._held[slot] = _numbers(block for block in blocks if block.length == BLOCK)
        self._changed = True

    def extend(self, slot: int, known: Sequence[Block[Any]], new: Sequence[Block[Any]]) -> None:
        """The state of a slot after the blocks `known` was copied to `new` blocks. It holds them,
        unless it has computed the state of `known` on its own."""
        held = self._held.setdefault(slot, [])
        if held == _numbers(known):
            held += _numbers(new)  # which no other slot holds yet

    def release(self, slot: int) -> None:
        """The content of a slot is void. Nothing is shared until the next `update`."""
        if self._held.pop(slot, None):
            self._changed = True
            self._emit(Share(()))

    def clear(self) -> None:
        """The content of all slots is void."""
        self._held.clear()
        self._changed = False
        self._emit(Share(()))

    def update(self) -> None:
        """Emit what is shared, if it has changed. Called before each step."""
        if not self._changed:
            return
        self._changed = False
        rows = [(0, 0)] * self._slots
        root: Branches = {}
        for slot in sorted(self._held):
            other, common, branches = slot, 0, root
            for number in self._held[slot]:
                if number in branches:
                    other, common = branches[number][0], common + BLOCK
                else:
                    branches[number] = (slot, {})
                branches = branches[number][1]
            rows[slot] = (other, common)
        self._emit(Share(tuple(rows)))


def _numbers(blocks: Iterable[Block[Any]]) -> list[int]:
    return [block.number for block in blocks]
