"""Finds the longest kept prefix that a sequence can begin with."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

from worker.cache.block_keys import BlockKeys, Tokens
from worker.cache.prefix_store import BLOCK, PrefixStore


@dataclass(frozen=True, slots=True)
class Hit:
    """Kept blocks that a sequence can begin with: the first `end` tokens."""

    keys: SequenceOf[bytes] = field(default_factory=list)
    end: int = 0


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """May be used by any thread. `snapshots`: the model begins at snapshots only. `grid`: and at
    multiples of this; `exact`: also between them, after a block that is shorter."""

    store: PrefixStore[Any]
    snapshots: bool
    grid: int
    exact: bool

    def longest(self, chain: BlockKeys, tokens: Tokens, most: int) -> Hit:
        """The longest prefix of at most `most` tokens."""
        keys = chain.extend(tokens, most // BLOCK)
        known = self.store.known(keys)
        if not self.snapshots:
            path = keys[: known * BLOCK // self.grid * self.grid // BLOCK]
            return self._tail(chain, path, tokens, most) or Hit(path, len(path) * BLOCK)
        for number in range(known, 0, -1):
            path, end = keys[:number], number * BLOCK
            hit = self._tail(chain, path, tokens, most)
            if hit is not None:
                return hit
            block = self.store.get(path[-1])
            if block is not None and block.snapshot is not None and end % self.grid == 0:
                return Hit(path, end)
        return Hit()

    def _tail(self, chain: BlockKeys, path: list[bytes], tokens: Tokens, most: int) -> Hit | None:
        """A path with the longest shorter block after it."""
        block = self.store.get(path[-1]) if path and self.exact else None
        if block is None:
            return None
        end = len(path) * BLOCK
        for length in sorted(block.tails, reverse=True):
            if end + length <= most:
                tail = chain.key(len(path), tokens(end, end + length))
                if self.store.get(tail) is not None:
                    return Hit([*path, tail], end + length)
        return None
