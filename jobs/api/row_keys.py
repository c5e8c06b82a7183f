"""The keys of the rows of a job within its run: row_index and repeat_index.

Producers reserve them, the rows in Parquet have them. Pure; any JSON value is taken, since any
program may have written a request.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
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


def given_repeat(options: Any) -> int:
    """`repeat` of job options or of an item; 0 without a valid one."""
    repeat = options.get("repeat") if isinstance(options, dict) else None
    valid = isinstance(repeat, int) and not isinstance(repeat, bool) and 0 <= repeat < MAX_REPEAT
    return repeat if valid else 0  # type: ignore[return-value]


def item_rows(job_id: str, first: int | None, items: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """The row_index and repeat_index of each item of a job. `first`: the job's own row."""
    for number, item in enumerate(items):
        row = given_row(item)
        if row is None:
            row = hashed_row(f"{job_id}/{number}") if first is None else first + number
        yield row, given_repeat(item)


def named_rows(request: Mapping[str, Any]) -> dict[int, tuple[int, int]]:
    """The row_index and repeat_index of the rows that a request names: of its items if it has some,
    by their places, else its own. A row that is not named can't be that of another request."""
    options, items = request.get("job"), request.get("items")
    first = given_row(options)
    if isinstance(items, list):
        given = enumerate(item_rows("", first, items))
        return {place: key for place, key in given if key[0] < MAX_ROW}
    return {} if first is None else {0: (first, given_repeat(options))}
