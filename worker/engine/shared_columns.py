"""Finds slots that begin with the same state, so that attention reads it from one of them.

A batch of sequences with a common beginning then reads that from memory once per step, not once per
sequence. The slots hold copies of the same blocks, so this changes no bit of the results.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from worker.engine.prefix_store import BLOCK, Block

Branches = dict[int, "Node"]
Node = tuple[
    int, Branches
]  # the lowest slot that holds a block after those before it; what follows


class SharedColumns:
    """`table`, int64 [slots, 2] on the CPU: of each slot another one, and how many of the first
    columns are equal in both; `update` computes it from what the slots hold."""

    def __init__(self, slots: int) -> None:
        self.table = torch.zeros(slots, 2, dtype=torch.int64)
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
            self.table.zero_()

    def clear(self) -> None:
        """The content of all slots is void."""
        self._held.clear()
        self._changed = False
        self.table.zero_()

    def update(self) -> None:
        """Bring the table up to date. Called before each step."""
        if not self._changed:
            return
        self._changed = False
        rows = [[0, 0] for _ in range(len(self.table))]
        root: Branches = {}
        for slot in sorted(self._held):
            other, common, branches = slot, 0, root
            for number in self._held[slot]:
                if number in branches:
                    other, common = branches[number][0], common + BLOCK
                else:
                    branches[number] = (slot, {})
                branches = branches[number][1]
            rows[slot] = [other, common]
        self.table.copy_(torch.tensor(rows))


def _numbers(blocks: Iterable[Block[Any]]) -> list[int]:
    return [block.number for block in blocks]
