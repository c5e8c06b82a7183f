"""The keys of blocks: hashes of the text up to the end of each, and where a `cache_salt` enters.

State of a sequence with a salt is shared with sequences of the same salt only, except for pinned
blocks: a prompt cache that the operator has loaded holds no tenant's text. So the salt enters the
keys after the last pinned block.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence

from worker.cache.prefix_store import BLOCK

Tokens = Callable[[int, int], list[int]]  # the token ids at positions [start, end)


def root_key(*facts: object) -> bytes:
    """The key before the first block. State is shared only where all facts are equal."""
    return hashlib.blake2b(repr(facts).encode("utf-8", "surrogatepass"), digest_size=32).digest()


def block_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of the block of `tokens` after `parent`."""
    return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=32).digest()


def salt_hash(salt: str) -> str:
    """The digest of a salt, as keys and files hold it; "" without one."""
    text = salt.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=16).hexdigest() if salt else ""


class BlockKeys:
    """The keys of one sequence's blocks. `root`: the key before the first one. `salt`: a
    `salt_hash`. `pinned`: whether a block is there for all salts."""

    def __init__(self, root: bytes, salt: str, pinned: Callable[[bytes], bool]) -> None:
        self.root, self.salt = root, salt
        self.keys: list[bytes] = []
        self._pinned = pinned
        self._shared = 0  # leading keys that do not depend on the salt

    def extend(self, tokens: Tokens, blocks: int) -> list[bytes]:
        """The keys of the first `blocks` blocks."""
        for number in range(len(self.keys), blocks):
            start = number * BLOCK
            key = self.key(number, tokens(start, start + BLOCK))
            if self.salt and number == self._shared and self._pinned(key):
                self._shared += 1
            self.keys.append(key)
        return self.keys[:blocks]

    def key(self, before: int, tokens: Sequence[int]) -> bytes:
        """The key of a block of `tokens`, short or not, after the first `before` blocks."""
        parent = self.parent(before)
        plain = block_key(parent, tokens)
        if not self.salt or before > self._shared or self._pinned(plain):
            return plain
        return block_key(root_key(parent, self.salt), tokens)

    def parent(self, before: int) -> bytes:
        """The key before the block that comes after the first `before` blocks."""
        return self.keys[before - 1] if before else self.root
