"""The keys of one sequence's blocks, and where its `cache_salt` enters them.

State of a sequence with a salt is shared with sequences of the same salt only, except for pinned
blocks: a prompt cache that the operator has loaded holds no tenant's text. So the salt enters the
keys after the last pinned block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from worker.cache.prefix_store import BLOCK, block_key, root_key

Tokens = Callable[[int, int], list[int]]  # the token ids at positions [start, end)


def salt_hash(salt: str) -> str:
    """The digest of a salt, as keys and files hold it; "" without one."""
    text = salt.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=16).hexdigest() if salt else ""


class KeyChain:
    """`root`: the key before the first block. `salt`: a `salt_hash`. `pinned`: whether a block is
    there for all salts."""

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
