"""The ids of the rows of a file, to find one that is there twice.

They are in a temporary database that moves to the disk when it is large: files of any length take
little memory.
"""

from __future__ import annotations

import hashlib
import sqlite3

CACHE_KIB = 16 * 1024  # in memory
DIGEST_BYTES = 12


class IdIndex:
    """Ids by their kind, with the place of the first row that has each. `close` it."""

    def __init__(self) -> None:
        self._database = sqlite3.connect("", isolation_level=None)
        for setting in (f"cache_size=-{CACHE_KIB}", "journal_mode=OFF", "synchronous=OFF"):
            self._database.execute(f"PRAGMA {setting}")
        self._database.execute(
            "CREATE TABLE ids (digest BLOB PRIMARY KEY, place TEXT) WITHOUT ROWID"
        )
        self._database.execute("BEGIN")  # one transaction: none for each row

    def add(self, kind: str, name: str, place: str) -> str | None:
        """The place of a row before with this id; None if there is none, and this is the first."""
        text = f"{kind}/{name}".encode("utf-8", "surrogatepass")
        digest = hashlib.blake2b(text, digest_size=DIGEST_BYTES).digest()
        added = self._database.execute("INSERT OR IGNORE INTO ids VALUES (?, ?)", (digest, place))
        if added.rowcount:
            return None
        found = self._database.execute("SELECT place FROM ids WHERE digest = ?", (digest,))
        return str(found.fetchone()[0])

    def close(self) -> None:
        self._database.close()
