"""Finds jobs in Redis by state, run, error and age, for operators.

Jobs are found in RQ's queues and registries, in pages; keys are never scanned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, NamedTuple

from redis import Redis

from jobs import keys
from jobs.results.outbox import run_of
from jobs.store.connection.protocol import Steps, command, retry
from jobs.store.job_state import JobState, Status, parse_state, unknown
from jobs.store.rq_layout import (
    CHANGING_FIELDS,
    FURTHER_FIELDS,
    deferred_key,
    job_key,
    parse_time,
    queue_key,
    queue_names,
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


def find_jobs(redis: Redis, wanted: Selection) -> Iterator[FoundJob]:
    """The jobs of all chatjobs queues that are selected, by queue and state."""
    now = time.time()
    for status, page in _listed(redis, wanted, None):
        for found in _read(redis, page):
            if found.state.status is status and _matches(found, wanted, now):
                yield found


def newest_jobs(redis: Redis, wanted: Selection, limit: int) -> Iterator[FoundJob]:
    """`limit` of these jobs, beginning with the one that ended, or was enqueued, last. Their times
    are read first, and then one page of jobs after the other.

    If all jobs of some states are wanted, the times of at most NEWEST or `limit` jobs in each queue
    and registry are read: of those that were queued last, or that are kept longest.
    """
    now = time.time()
    most = max(NEWEST, limit) if wanted.takes_all else None
    return islice(_by_time(redis, wanted, now, most), limit)


def _by_time(redis: Redis, wanted: Selection, now: float, most: int | None) -> Iterator[FoundJob]:
    since: dict[str, float] = {}
    for _, page in _listed(redis, wanted, most):
        since.update(zip(page, _times(redis, page), strict=True))
    ids = sorted(since, key=since.__getitem__, reverse=True)
    for start in range(0, len(ids), PAGE):
        for found in _read(redis, ids[start : start + PAGE]):
            if found.state.status in wanted.states and _matches(found, wanted, now):
                yield found


def _listed(
    redis: Redis, wanted: Selection, most: int | None
) -> Iterator[tuple[Status, list[str]]]:
    """The ids in the queues and registries, in pages; with `most`, the last ones of each."""
    for queue in queue_names(redis):
        if not keys.is_queue(queue) or wanted.model not in (None, keys.model_of(queue)):
            continue
        for status in wanted.states:
            for page in _pages(redis, queue, status, most):
                yield status, page


def read_job(job_id: str) -> Steps[FoundJob]:
    """One job. Raises JobError (not_found)."""
    values = yield from retry(command("hmget", job_key(job_id), FIELDS))
    found = _found(job_id, values)
    if found.state.status is Status.UNKNOWN:
        raise unknown(job_id)
    return found


def _pages(redis: Any, queue: str, status: Status, most: int | None) -> Iterator[list[str]]:
    """The ids of the jobs of a queue in this state. A job that moves meanwhile may be missed."""
    if status is Status.QUEUED:
        yield from _pages_of(redis.lrange, queue_key(queue), most)
        yield from _pages_of(redis.lrange, keys.quarantine(queue), most)
        for tenant in redis.zrange(keys.tenants(queue), 0, -1):
            if tenant:
                waiting = keys.tenant_queue(queue, tenant.decode(errors="replace"))
                yield from _pages_of(redis.lrange, waiting, most)
    elif status is Status.DEFERRED:
        yield from _pages_of(redis.zrange, deferred_key(queue), most)
    elif status is Status.SCHEDULED:
        yield from _pages_of(redis.zrange, scheduled_key(queue), most)
    elif status is Status.STARTED:
        yield from _pages_of(redis.zrange, wip_key(queue), most)
    elif status is Status.FINISHED:
        yield from _pages_of(redis.zrange, registry_key(queue, "finished"), most)
    elif status is Status.FAILED:
        yield from _pages_of(redis.zrange, registry_key(queue, "failed"), most)
    else:
        yield from _pages_of(redis.zrange, registry_key(queue, "canceled"), most)


def _pages_of(
    read: Callable[[str, int, int], list[bytes]], key: str, most: int | None
) -> Iterator[list[str]]:
    """The ids in a list or a sorted set; with `most`, so many, from its end backwards."""
    for start in count(0, PAGE):
        size = PAGE if most is None else min(PAGE, most - start)
        if size <= 0:
            return
        first = start if most is None else -start - size
        found = read(key, first, first + size - 1)
        if most is not None:
            found.reverse()
        if found:
            yield [member.decode(errors="replace").partition(":")[0] for member in found]
        if len(found) < size:
            return


def _read(redis: Redis, job_ids: list[str]) -> Iterator[FoundJob]:
    """The jobs, one at a time: their requests may be large."""
    pipeline = redis.pipeline(transaction=False)
    for job_id in job_ids:
        pipeline.hmget(job_key(job_id), FIELDS)
    for job_id, values in zip(job_ids, pipeline.execute(), strict=True):
        yield _found(job_id, values)


def _times(redis: Redis, job_ids: list[str]) -> Iterator[float]:
    """Since when the jobs have their states, as in FoundJob."""
    pipeline = redis.pipeline(transaction=False)
    for job_id in job_ids:
        pipeline.hmget(job_key(job_id), TIMES)
    for ended_at, enqueued_at in pipeline.execute():
        yield _since(parse_time(ended_at), parse_time(enqueued_at))


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
