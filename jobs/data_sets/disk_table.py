"""A temporary table of texts by their keys, which moves to the disk when it is large: files of any
length take little memory."""

from __future__ import annotations

import sqlite3

CACHE_KIB = 16 * 1024  # in memory


class DiskTable:
    """Texts, or None, by keys of one type. `close` it."""

    def __init__(self) -> None:
        self._database = sqlite3.connect("", isolation_level=None)
        for setting in (f"cache_size=-{CACHE_KIB}", "journal_mode=OFF", "synchronous=OFF"):
            self._database.execute(f"PRAGMA {setting}")
        self._database.execute("CREATE TABLE texts (key BLOB PRIMARY KEY, text TEXT) WITHOUT ROWID")
        self._database.execute("BEGIN")  # one transaction: none for each row

    def add(self, key: bytes, text: str | None) -> bool:
        """False if the key is there, with the text that it has."""
        added = self._database.execute("INSERT OR IGNORE INTO texts VALUES (?, ?)", (key, text))
        return bool(added.rowcount)

    def get(self, key: bytes) -> str | None:
        """The text of a key. Raises KeyError."""
        found = self._database.execute("SELECT text FROM texts WHERE key = ?", (key,)).fetchone()
        if found is None:
            raise KeyError(key)
        text: str | None = found[0]
        return text

    def close(self) -> None:
        self._database.close()
