"""The rows of a run in Redis, for the process that holds its lease. `jobs.runs.producer` calls
this."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any, NamedTuple

from redis import Redis

from jobs import keys, lua
from jobs.api.score_request import ScoreRequest
from jobs.errors import JobError
from jobs.operations import Request
from jobs.results.outbox import OutboxEntry, encode
from jobs.store.backlog import has_unwritten
from jobs.store.enqueue import Enqueued, enqueue
from jobs.store.eviction import EvictionCheck
from jobs.store.expiry import ROW_SECONDS
from jobs.store.new_job import new_job
from jobs.store.preludes import DELETE_JOB_LUA, QUEUE_LUA, RESERVATIONS_LUA
from jobs.store.producer_lease import LeaseLost, ProducerLease
from jobs.store.purge import keys_of_job
from jobs.store.reservations import digest_of, is_unwritten, job_of
from jobs.store.rq_layout import executions_key, job_key, results_key

END_ROW = lua.load("jobs.store", "end_row", QUEUE_LUA, RESERVATIONS_LUA)
FORGET_ROWS = lua.load("jobs.store", "forget_rows", QUEUE_LUA, RESERVATIONS_LUA, DELETE_JOB_LUA)

FORGET_AT_ONCE = 100  # rows in one script: two milliseconds of Redis
KEYS_AT_ONCE = 1000  # deleted in one command


# KEYS and ARGV of the scripts, by name and in order.


class EndRowKeys(NamedTuple):
    producer: str
    rows: str
    outbox: str
    outboxes: str


class EndRowArgs(NamedTuple):
    token: str
    field: str
    digest: bytes
    row_seconds: int
    run: str
    row: str


class ForgetRowsKeys(NamedTuple):
    producer: str
    rows: str
    finished: str
    failed: str
    canceled: str
    queue: str
    open_bytes: str
    deadlines: str


class ForgetRowsArgs(NamedTuple):
    token: str
    withdraw: int


class RowJob(NamedTuple):
    """A sample of a row of a run, and its job."""

    row: int
    repeat: int
    job_id: str
    queue: str  # of RQ


class Owner(NamedTuple):
    """The job that has the row of an item. job_id: "" of one that has ended. is_same: it has the
    same item."""

    job_id: str
    has_ended: bool
    is_same: bool


class RowState(Enum):
    """State of a row in Redis."""

    NONE = "none"  # no request has it
    OPEN = "open"  # its job has not ended
    ENDED = "ended"  # its row is in the outbox, or in Parquet


class RunRows:
    """The rows of one run in Redis. Acquire the lease first. All methods raise redis.RedisError,
    and may be called again after it; those that change rows raise LeaseLost."""

    def __init__(self, redis: Redis, lease: ProducerLease) -> None:
        self.lease, self.run = lease, lease.run
        self._redis: Any = redis  # its stubs leave open whether replies are bytes
        self._eviction = EvictionCheck()
        self._end = redis.register_script(END_ROW)
        self._forget = redis.register_script(FORGET_ROWS)

    def enqueue(self, requests: Sequence[Request]) -> list[Enqueued | JobError]:
        """Enqueue requests with rows: for each its job, or why it is refused. Raises JobError
        while Redis may evict keys."""
        self._eviction.require(self._redis)
        return enqueue(self._redis, requests, holder=self.lease.token)

    def owners(self, requests: Sequence[ScoreRequest]) -> list[Owner | None]:
        """The jobs that have the rows of requests with one item each; None for a row that has none,
        or a job that has left Redis without the row."""
        rows = [(item["row"], item.get("repeat", 0)) for one in requests for item in one.items]
        found, _ = self._read_reservations(rows)
        jobs = {
            place: job_of(value, self.run, rows[place][0])
            for place, value in enumerate(found)
            if value and is_unwritten(value)
        }
        pipeline = self._redis.pipeline(transaction=False)
        for job in jobs.values():
            pipeline.exists(job_key(job))
        exists = dict(zip(jobs, pipeline.execute() if jobs else [], strict=True))
        owners: list[Owner | None] = []
        for place, (request, value) in enumerate(zip(requests, found, strict=True)):
            # A job that was gone may have ended since: enqueueing looks again.
            if not value or not exists.get(place, True):
                owners.append(None)
                continue
            (row,) = new_job(request).rows
            is_same = value.startswith(row.digest)
            owners.append(Owner(jobs.get(place, ""), place not in jobs, is_same))
        return owners

    def end(self, entries: Sequence[OutboxEntry]) -> list[bool]:
        """Write rows that no job can run; False for one that a request has."""
        pipeline = self._redis.pipeline(transaction=False)
        for entry in entries:
            row = entry["row_index"]
            names = EndRowKeys(
                keys.producer(self.run),
                keys.rows(self.run, row),
                keys.outbox(self.run),
                keys.OUTBOXES,
            )
            args = EndRowArgs(
                self.lease.token,
                keys.row_field(row, entry["repeat_index"]),
                digest_of(json.dumps(entry["error"])),
                ROW_SECONDS,
                self.run,
                encode(entry),
            )
            self._end(keys=names, args=args, client=pipeline)
        replies = pipeline.execute() if entries else []
        if any(reply[0] == b"producer" for reply in replies):
            raise LeaseLost(self.run)
        return [reply[0] != b"row" for reply in replies]

    def states(self, rows: Sequence[RowJob], *, check_jobs: bool = False) -> list[RowState]:
        """Look up the state of each row. `check_jobs`: a row whose job was deleted before it ended
        is NONE: it may be enqueued again."""
        jobs = [one.job_id for one in rows] if check_jobs else []
        found, exists = self._read_reservations([(one.row, one.repeat) for one in rows], jobs)
        return [
            _state(value, is_gone=not exists.get(one.job_id, True))
            for one, value in zip(rows, found, strict=True)
        ]

    def forget(self, rows: Sequence[RowJob], *, withdraw: bool = False) -> list[bool]:
        """Remove all that Redis holds of rows: for rows that are in Parquet, and for lost ones.
        `withdraw`: also of jobs that wait. False for a row whose job has not ended."""
        groups: dict[tuple[str, str], list[int]] = {}  # places in the list
        for place, one in enumerate(rows):
            groups.setdefault((keys.rows(self.run, one.row), one.queue), []).append(place)
        calls = [
            (*group, places[start : start + FORGET_AT_ONCE])
            for group, places in groups.items()
            for start in range(0, len(places), FORGET_AT_ONCE)
        ]
        pipeline = self._redis.pipeline(transaction=False)
        for name, queue, places in calls:
            self._forget_some(name, queue, [rows[place] for place in places], withdraw, pipeline)
        replies = pipeline.execute() if calls else []
        if -1 in replies:
            raise LeaseLost(self.run)
        gone = [False] * len(rows)
        for (_, _, places), reply in zip(calls, replies, strict=True):
            for place, is_gone in zip(places, reply, strict=True):
                gone[place] = is_gone == 1
        return gone

    def _forget_some(
        self, name: str, queue: str, rows: Sequence[RowJob], withdraw: bool, pipeline: Any
    ) -> None:
        """Add a call of the script for rows of one hash of reservations, `name`, and one queue."""
        of_all = keys_of_job("", queue)
        names: list[str] = [
            *ForgetRowsKeys(
                keys.producer(self.run),
                name,
                of_all.finished,
                of_all.failed,
                of_all.canceled,
                of_all.queue,
                of_all.open_bytes,
                of_all.deadlines,
            )
        ]
        args: list[Any] = [*ForgetRowsArgs(self.lease.token, int(withdraw))]
        for one in rows:
            job = one.job_id
            names += (job_key(job), results_key(job), keys.log(job), executions_key(job))
            args += (keys.row_field(one.row, one.repeat), job)
        self._forget(keys=names, args=args, client=pipeline)

    def has_unwritten(self) -> bool:
        """True if rows wait for Parquet."""
        return has_unwritten(self._redis, self.run)

    def want(self) -> None:
        """Have the rows that wait written at once."""
        self._redis.sadd(keys.WANTED, self.run)

    def _read_reservations(
        self, rows: Sequence[tuple[int, int]], jobs: Iterable[str] = ()
    ) -> tuple[list[bytes | None], dict[str, bool]]:
        """The reservations of rows, by row_index and repeat_index, and whether jobs exist. These
        are read first: one that ends meanwhile has changed its reservations."""
        by_key: dict[str, list[int]] = {}  # places in the list
        for place, (row, _) in enumerate(rows):
            by_key.setdefault(keys.rows(self.run, row), []).append(place)
        names = dict.fromkeys(jobs)
        pipeline = self._redis.pipeline(transaction=False)
        for job in names:
            pipeline.exists(job_key(job))
        for name, places in by_key.items():
            pipeline.hmget(name, [keys.row_field(*rows[place]) for place in places])
        replies = pipeline.execute() if rows else []
        found: list[bytes | None] = [None] * len(rows)
        for places, values in zip(by_key.values(), replies[len(names) :], strict=True):
            for place, value in zip(places, values, strict=True):
                found[place] = value
        return found, {job: bool(one) for job, one in zip(names, replies, strict=False)}


def forget_reservations(redis: Redis, run: str, rows: Iterable[int]) -> None:
    """Forget which requests have these rows of a run, and the rows of all its custom_ids: they may
    be submitted anew. Nothing of the run is on its way. Raises redis.RedisError."""
    names = [*{keys.rows(run, row) for row in rows}, keys.next_row(run)]
    names += [keys.custom_ids_bucket(run, number) for number in range(keys.CUSTOM_ID_BUCKETS)]
    for start in range(0, len(names), KEYS_AT_ONCE):
        redis.delete(*names[start : start + KEYS_AT_ONCE])


def _state(reservation: bytes | None, *, is_gone: bool) -> RowState:
    if not reservation or (is_gone and is_unwritten(reservation)):
        return RowState.NONE
    return RowState.OPEN if is_unwritten(reservation) else RowState.ENDED
