"""The ids of the rows of a file, to find one that is there twice."""

from __future__ import annotations

import hashlib

from jobs.data_sets.disk_table import DiskTable

DIGEST_BYTES = 12


class IdIndex:
    """Ids by their kind, with the place of the first row that has each. `close` it."""

    def __init__(self) -> None:
        self._places = DiskTable()

    def add(self, kind: str, name: str, place: str) -> str | None:
        """The place of a row before with this id; None if there is none, and this is the first."""
        text = f"{kind}/{name}".encode("utf-8", "surrogatepass")
        digest = hashlib.blake2b(text, digest_size=DIGEST_BYTES).digest()
        return None if self._places.add(digest, place) else self._places.get(digest)

    def close(self) -> None:
        self._places.close()
