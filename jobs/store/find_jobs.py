"""Finds jobs in Redis by state, run, error and age, for operators.

Jobs are found in RQ's queues and registries, in pages; keys are never scanned.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

from jobs import keys
from jobs.results.outbox import run_of
from jobs.store.connection.protocol import Emit, Emitting, Steps, command, commands, retry
from jobs.store.job_state import JobState, Status, parse_state, unknown
from jobs.store.rq_layout import (
    CHANGING_FIELDS,
    FURTHER_FIELDS,
    QUEUES_KEY,
    deferred_key,
    job_key,
    parse_time,
    queue_key,
    queues_of,
    registry_key,
    scheduled_key,
    wip_key,
)

PAGE = 100  # jobs whose hashes are read at once
NEWEST = 1000  # jobs of a queue in one state that are compared to find the newest
TIMES = ("ended_at", "enqueued_at")
FIELDS = (*CHANGING_FIELDS, *FURTHER_FIELDS, "ended_at")


@dataclass(frozen=True, slots=True)
class Selection:
    """The criteria of a search for jobs. None: any value."""

    states: tuple[Status, ...]
    run: str | None = None
    model: str | None = None
    tenant: str | None = None
    session: str | None = None
    code: str | None = None  # of the error
    older: float = 0.0  # seconds since the job ended, or was enqueued

    @property
    def takes_all(self) -> bool:
        """True if every job of the states and the model is selected."""
        others = (self.run, self.tenant, self.session, self.code)
        return not self.older and all(value is None for value in others)


class FoundJob(NamedTuple):
    """A job, and since when it has its state (seconds since the epoch)."""

    state: JobState
    since: float

    @property
    def run(self) -> str:
        return run_of(self.state.request)

    @property
    def tenant(self) -> Any:
        return self._option("tenant")

    @property
    def session(self) -> Any:
        return self._option("session")

    def _option(self, name: str) -> Any:
        options = self.state.request.get("job")
        return options.get(name) if isinstance(options, dict) else None

    @property
    def code(self) -> str | None:
        return self.state.error.code if self.state.error is not None else None


class _List(NamedTuple):
    """A list or a sorted set with the ids of jobs that have a state."""

    status: Status
    read: str  # the command that reads a part of it
    key: str

    def page(
        self, start: int, size: int, *, from_end: bool, deadline: float | None = None
    ) -> Steps[list[str]]:
        """The next `size` ids behind the first `start`, or, backwards, before the last ones."""
        first = -start - size if from_end else start
        last = first + size - 1
        found: list[bytes] = yield from retry(command(self.read, self.key, first, last), deadline)
        if from_end:
            found.reverse()
        return [member.decode(errors="replace").partition(":")[0] for member in found]


def find_jobs(wanted: Selection, deadline: float | None = None) -> Emitting[FoundJob]:
    """Emits the jobs of all chatjobs queues that are selected, by queue and state. A job that
    another process moves meanwhile may be missed, or found twice. An outage is waited out until
    `deadline`."""
    now = time.time()
    for some in (yield from _lists(wanted, deadline)):
        # Waiting jobs leave their list at its head, and would move the pages behind it.
        from_end = some.read == "lrange"
        for start in count(0, PAGE):
            page = yield from some.page(start, PAGE, from_end=from_end, deadline=deadline)
            for found in (yield from _read(page, deadline)):
                if found.state.status is some.status and _matches(found, wanted, now):
                    yield Emit(found)
            if len(page) < PAGE:
                break


def newest_jobs(wanted: Selection, limit: int, deadline: float | None = None) -> Emitting[FoundJob]:
    """Emits `limit` of these jobs, beginning with the one that ended, or was enqueued, last. Their
    times are read first, and then one page of jobs after the other. An outage is waited out until
    `deadline`.

    If all jobs of some states are wanted, the times of at most NEWEST or `limit` jobs in each queue
    and registry are read: of those that were queued last, or that are kept longest.
    """
    now = time.time()
    most = max(NEWEST, limit) if wanted.takes_all else None
    since: dict[str, float] = {}
    for some in (yield from _lists(wanted, deadline)):
        for start in count(0, PAGE):
            size = PAGE if most is None else min(PAGE, most - start)
            if size <= 0:
                break
            page = yield from some.page(start, size, from_end=True, deadline=deadline)
            since.update(zip(page, (yield from _times(page, deadline)), strict=True))
            if len(page) < size:
                break
    ids = sorted(since, key=since.__getitem__, reverse=True)
    left = limit
    for start in range(0, len(ids), PAGE):
        for found in (yield from _read(ids[start : start + PAGE], deadline)):
            if left and found.state.status in wanted.states and _matches(found, wanted, now):
                left -= 1
                yield Emit(found)
        if not left:
            return


def read_job(job_id: str) -> Steps[FoundJob]:
    """One job. Raises JobError (not_found)."""
    (found,) = yield from _read([job_id])
    if found.state.status is Status.UNKNOWN:
        raise unknown(job_id)
    return found


def _lists(wanted: Selection, deadline: float | None = None) -> Steps[list[_List]]:
    """The lists and sorted sets in which the jobs of a selection are."""
    found: list[_List] = []
    names = yield from retry(command("smembers", QUEUES_KEY), deadline)
    for queue in queues_of(names):
        if not keys.is_queue(queue) or wanted.model not in (None, keys.model_of(queue)):
            continue
        for status in wanted.states:
            if status is Status.QUEUED:
                found += yield from _waiting(queue, deadline)
            else:
                found.append(_List(status, "zrange", _registry(queue, status)))
    return found


def _waiting(queue: str, deadline: float | None) -> Steps[list[_List]]:
    """The lists of the jobs that wait in a queue."""
    tenants = yield from retry(command("zrange", keys.tenants(queue), 0, -1), deadline)
    names = [queue_key(queue), keys.quarantine(queue)]
    names += [
        keys.tenant_queue(queue, tenant.decode(errors="replace")) for tenant in tenants if tenant
    ]
    return [_List(Status.QUEUED, "lrange", name) for name in names]


def _registry(queue: str, status: Status) -> str:
    if status is Status.DEFERRED:
        return deferred_key(queue)
    if status is Status.SCHEDULED:
        return scheduled_key(queue)
    if status is Status.STARTED:
        return wip_key(queue)
    if status is Status.FINISHED:
        return registry_key(queue, "finished")
    return registry_key(queue, "failed" if status is Status.FAILED else "canceled")


def _read(job_ids: list[str], deadline: float | None = None) -> Steps[list[FoundJob]]:
    if not job_ids:
        return []
    reads = commands([("hmget", job_key(job_id), FIELDS) for job_id in job_ids])
    replies = yield from retry(reads, deadline)
    return [_found(job_id, values) for job_id, values in zip(job_ids, replies, strict=True)]


def _times(job_ids: list[str], deadline: float | None) -> Steps[list[float]]:
    """Since when the jobs have their states, as in FoundJob."""
    if not job_ids:
        return []
    reads = commands([("hmget", job_key(job_id), TIMES) for job_id in job_ids])
    replies = yield from retry(reads, deadline)
    return [_since(parse_time(ended), parse_time(enqueued)) for ended, enqueued in replies]


def _since(ended_at: float | None, enqueued_at: float | None) -> float:
    return ended_at or enqueued_at or 0.0


def _found(job_id: str, values: list[bytes | None]) -> FoundJob:
    state = parse_state(job_id, FIELDS, values)
    ended_at = parse_time(values[FIELDS.index("ended_at")])
    return FoundJob(state, _since(ended_at, state.enqueued_at))


def _matches(found: FoundJob, wanted: Selection, now: float) -> bool:
    return (
        wanted.run in (None, found.run)
        and wanted.tenant in (None, found.tenant)
        and wanted.session in (None, found.session)
        and wanted.code in (None, found.code)
        and now - found.since >= wanted.older
    )
