"""The rows that are in Redis and not in Parquet yet: how many, since when, and why.

`BacklogCounter` is for workers that must not claim too much: all of them count together, each call
looks at a portion of the outboxes and gets the last complete count. `read_unwritten` is for people:
exact, by run, with the age of the oldest row. The entries of one run are for those who wait for
its rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import redis
from redis import Redis

from jobs import keys, lua
from jobs.store.connection.protocol import Steps, command, retry
from jobs.store.limits import read_limits

COUNT = lua.load("jobs.store", "count")
PORTION = 1000  # outboxes: about three milliseconds of Redis
PAUSE_MILLISECONDS = 2000  # between two counts
EXPIRE_MILLISECONDS = 15_000  # more than a worker's pause between two checks


# KEYS and ARGV of count.lua, by name and in order.


class CountKeys(NamedTuple):
    outboxes: str
    backlog: str


class CountArgs(NamedTuple):
    outbox_prefix: str
    portion: int
    pause_milliseconds: int
    expire_milliseconds: int


EntryId = tuple[int, int]  # of a Redis stream: milliseconds, and a number within one


class Backlog(NamedTuple):
    """The rows that wait for Parquet."""

    rows: int
    bytes: int
    max_bytes: int


class BacklogCounter:
    """Counts the rows in one Redis, together with the other workers."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._count = redis.register_script(COUNT)

    def read(self) -> Backlog:
        """The rows in the outboxes of all runs, and the limit of their bytes."""
        args = CountArgs(keys.outbox(""), PORTION, PAUSE_MILLISECONDS, EXPIRE_MILLISECONDS)
        found: Any = self._count(keys=CountKeys(keys.OUTBOXES, keys.BACKLOG), args=args)
        rows, size = found
        return Backlog(rows, size, read_limits(self._redis).outbox_bytes)


@dataclass(frozen=True, slots=True)
class Unwritten:
    """runs: number of ended jobs whose rows are not written, by run. oldest: seconds since the
    first of them ended, by the clock of Redis."""

    runs: Mapping[str, int]
    oldest: float = 0.0

    @property
    def count(self) -> int:
        return sum(self.runs.values())


def read_unwritten(client: redis.Redis, runs: Iterable[str] | None = None) -> Unwritten:
    """The rows that wait, of all runs or of these. A key of another type counts as empty."""
    found: Any = client.smembers(keys.OUTBOXES) if runs is None else runs
    names = sorted(one.decode(errors="replace") if isinstance(one, bytes) else one for one in found)
    if not names:
        return Unwritten({})
    pipeline = client.pipeline(transaction=False)
    pipeline.time()
    for name in names:
        pipeline.xlen(keys.outbox(name))
        pipeline.xrange(keys.outbox(name), count=1)
    now, *replies = pipeline.execute(raise_on_error=False)
    counts: dict[str, int] = {}
    oldest = 0.0
    for name, count, first in zip(names, replies[::2], replies[1::2], strict=True):
        if isinstance(count, int) and count and isinstance(first, list) and first:
            counts[name] = count
            oldest = max(oldest, now[0] + now[1] / 1e6 - int(first[0][0].split(b"-")[0]) / 1000)
    return Unwritten(counts, oldest)


def has_unwritten(client: redis.Redis, run: str) -> bool:
    """True if the run has rows, or a part, that a recorder has to write."""
    return bool(client.exists(keys.outbox(run), keys.parts(run)))


def read_first_entry(run: str, deadline: float | None = None) -> Steps[EntryId | None]:
    """The id of the oldest row in the outbox of a run; None if it is empty."""
    found = yield from retry(command("xrange", keys.outbox(run), count=1), deadline)
    return _entry_id(found[0][0]) if found else None


def read_last_entry(run: str, deadline: float | None = None) -> Steps[EntryId | None]:
    """The id of the newest row in the outbox of a run; None if it is empty."""
    found = yield from retry(command("xrevrange", keys.outbox(run), count=1), deadline)
    return _entry_id(found[0][0]) if found else None


def count_entries(run: str, deadline: float | None = None) -> Steps[int]:
    """Number of rows in the outbox of a run."""
    count: int = yield from retry(command("xlen", keys.outbox(run)), deadline)
    return count


def _entry_id(text: bytes) -> EntryId:
    milliseconds, number = text.split(b"-")
    return int(milliseconds), int(number)


def recording_faults(processes: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The faults that keep processes from writing rows, by name. `processes`: the status of workers
    and recorders."""
    found = {}
    for process in processes:
        results = process.get("results")
        error = results.get("error") if isinstance(results, dict) else None
        if isinstance(error, str) and error:
            found[str(process["name"])] = error
    return found


def any_records(processes: Iterable[Mapping[str, Any]]) -> bool:
    """True if a worker or a recorder has a results folder, or a worker is of an older version,
    which does not say so."""
    return any(process.get("results", {}) is not None for process in processes)
