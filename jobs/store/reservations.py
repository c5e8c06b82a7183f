"""Reservations of the rows of a run: their form in Redis, and how scripts take the rows of a job.

reservations.lua writes them; enqueueing, the ends of jobs and the producers of runs call this.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

from jobs import keys

# As in reservations.lua: the digest, a mark while the row is not written, then the job of an item.
DIGEST_BYTES = 8


class NewRow(NamedTuple):
    """A row that a job is to have. digest: of the request, or of its item."""

    row: int
    repeat: int
    digest: bytes


class RowHashes:
    """Numbers the hashes that hold the reservations of some rows, as scripts take them."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}  # from 1, by the key of the hash

    @property
    def names(self) -> tuple[str, ...]:
        """Keys of the hashes of all rows that `fields` was called with, in order."""
        return tuple(self._places)

    def fields(self, run: str, rows: Iterable[tuple[int, int]]) -> str:
        """Text of rows, by row_index and repeat_index: "1:7,2:0.3" are the field 7 of the first
        hash and 0.3 of the second one."""
        found = []
        for row, repeat in rows:
            place = self._places.setdefault(keys.rows(run, row), len(self._places) + 1)
            found.append(f"{place}:{keys.row_field(row, repeat)}")
        return ",".join(found)


class ReservedRows(NamedTuple):
    """The rows of one job as scripts take them; see RowHashes. hashes: their names."""

    hashes: tuple[str, ...]
    fields: str


def reserved_rows(run: str, rows: Iterable[tuple[int, int]]) -> ReservedRows:
    """`rows`: by row_index and repeat_index."""
    hashes = RowHashes()
    fields = hashes.fields(run, rows)
    return ReservedRows(hashes.names, fields)


def digest_of(text: str) -> bytes:
    """The digest in a reservation."""
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()


def is_unwritten(reservation: bytes) -> bool:
    """True if the row of a reservation is still to be written."""
    return len(reservation) > DIGEST_BYTES


def row_job(run: str, row: int, digest: bytes) -> str:
    """The id of the job whose first row this is, from the digest of its request."""
    return hashlib.blake2b(f"{run}/{row}/".encode() + digest, digest_size=16).hexdigest()


def job_of(reservation: bytes, run: str, row: int) -> str:
    """The id of the job that has a reservation of a row: named in it if the row and the digest do
    not tell it."""
    named = reservation[DIGEST_BYTES + 1 :]
    return named.decode(errors="replace") or row_job(run, row, reservation[:DIGEST_BYTES])
