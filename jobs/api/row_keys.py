"""The keys of the rows of a job within its run: row_index and repeat_index.

Producers reserve them, the rows in Parquet have them. Pure; any JSON value is taken, since any
program may have written a request.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

MAX_ROW = 2**62  # rows from here on are hashes of job ids
MAX_REPEAT = 2**31


def given_row(options: Any) -> int | None:
    """`row` of job options or of an item; None without a valid one."""
    row = options.get("row") if isinstance(options, dict) else None
    valid = isinstance(row, int) and not isinstance(row, bool) and 0 <= row < MAX_ROW
    return row if valid else None


def hashed_row(name: str) -> int:
    """The row_index of what has no row, from its name: in [MAX_ROW, 2 * MAX_ROW), so that it can't
    collide with a given one, and the same for each attempt."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2 | MAX_ROW


def item_rows(job_id: str, first: int | None, items: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """The row_index and repeat_index of each item of a job. `first`: the job's own row."""
    for number, item in enumerate(items):
        row = given_row(item)
        if row is None:
            row = hashed_row(f"{job_id}/{number}") if first is None else first + number
        repeat = item.get("repeat") if isinstance(item, dict) else None
        if not isinstance(repeat, int) or isinstance(repeat, bool) or not 0 <= repeat < MAX_REPEAT:
            repeat = 0
        yield row, repeat
