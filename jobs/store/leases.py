"""The leases of a worker: checks them, returns their jobs to the queues, forgets lost ones.

A started job is a member `<job>:<execution>` of `rq:wip:<queue>`: the lease of this attempt. The
script that ends or returns the job removes it (lease.lua); a script that does not find it changes
nothing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from redis import Redis
from redis.exceptions import OutOfMemoryError

from jobs import keys, lua
from jobs.results.failures import Failure, parse_failures
from jobs.store import rq_layout
from jobs.store.claimed_job import ClaimedJob, Lease
from jobs.store.damage import readable
from jobs.store.preludes import LEASE_LUA, QUEUE_LUA, RESERVATIONS_LUA, TENANT_RUNNING_LUA
from jobs.store.rq_layout import (
    ATTEMPT,
    CANCEL,
    FAILURES,
    LOST,
    LOST_AT,
    MACHINE_ERRORS,
    RETRIED,
)
from jobs.store.workers import DeadWorker

logger = logging.getLogger(__name__)

RETURN = lua.load(
    "jobs.store", "return", QUEUE_LUA, RESERVATIONS_LUA, TENANT_RUNNING_LUA, LEASE_LUA
)

LOST_SECONDS = 3600.0  # after this time without a death, those of before no longer count
MAX_MACHINE_ERRORS = 20  # machines that may fail to run a job before it fails


# The tables of lease.lua, KEYS and ARGV of return.lua, by name and in order.


class LeaseKeys(NamedTuple):
    wip: str
    execution: str
    executions: str
    started: str
    workers: str


class LeaseArgs(NamedTuple):
    job_id: str
    execution_id: str
    entry: str
    dead: str
    seen_lease: int


class ReturnKeys(NamedTuple):
    wip: str
    execution: str
    executions: str
    started: str
    workers: str
    job: str
    queue: str
    quarantine: str
    scheduled: str
    open_bytes: str
    old_queue: str


class ReturnArgs(NamedTuple):
    job_id: str
    execution_id: str
    entry: str
    dead: str
    seen_lease: int
    push: str
    counter: str = ""
    limit: int = 0
    undo_attempt: int = 0
    lost: int | str = ""
    lost_at: int | str = ""
    group: str = ""
    delay: int | str = ""
    failures: str = ""
    origin: str = ""
    longer: str = ""


def lease_keys(lease: Lease, worker: str) -> LeaseKeys:
    """The keys of a lease that `worker` has."""
    return LeaseKeys(
        wip=rq_layout.wip_key(lease.queue),
        execution=rq_layout.execution_key(lease.job, lease.execution),
        executions=rq_layout.executions_key(lease.job),
        started=keys.started(worker),
        workers=keys.WORKERS,
    )


def lease_args(lease: Lease, dead: DeadWorker | None) -> LeaseArgs:
    """`dead`: the worker that has the lease, if that is not the caller."""
    name, seen_lease = ("", 0) if dead is None else (dead.name, dead.lease)
    return LeaseArgs(lease.job, lease.execution, lease.entry, name, seen_lease)


def return_keys(lease: Lease, worker: str, target: str | None = None) -> ReturnKeys:
    """The keys to return a job that `worker` has started. `target`: the queue that it moves to, if
    that is another one."""
    target = target or lease.queue
    return ReturnKeys(
        *lease_keys(lease, worker),
        job=rq_layout.job_key(lease.job),
        queue=rq_layout.queue_key(target),
        quarantine=keys.quarantine(target),
        scheduled=rq_layout.scheduled_key(target),
        open_bytes=keys.OPEN_BYTES,
        old_queue=rq_layout.queue_key(lease.queue),
    )


@dataclass(frozen=True, slots=True)
class StartedJob:
    """`lost`: the workers that died while they ran it, and count."""

    lease: Lease
    lost: int
    group: str = ""  # of suspects, that it returns to
    failures: tuple[Failure, ...] = ()


class Leases:
    """The leases of one worker. `of`: the name of the caller, or a dead worker; nothing changes if
    that turns out to be alive."""

    def __init__(self, redis: Redis, of: str | DeadWorker) -> None:
        self._redis: Any = redis  # its stubs type neither pipelines nor replies as bytes
        self._dead = of if isinstance(of, DeadWorker) else None
        self._worker = of.name if isinstance(of, DeadWorker) else of
        self._return = redis.register_script(RETURN)

    # --- reading ----------------------------------------------------------------------------------

    def started(self) -> list[StartedJob]:
        """The jobs that the worker has started, in the order of its claims."""
        entries = self._entries(keys.started(self._worker))
        if not entries:
            return []
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.time()
        for _, job, _ in entries:
            pipeline.hmget(rq_layout.job_key(job), ATTEMPT, LOST, LOST_AT, FAILURES)
        (now, _), *found = readable(pipeline, unreadable=(None,) * 4)
        return [
            StartedJob(
                Lease(job, queue, execution, _number(attempt)),
                _number(lost) if abs(now - _number(lost_at)) < LOST_SECONDS else 0,
                failures=tuple(parse_failures(failures)),
            )
            for (execution, job, queue), (attempt, lost, lost_at, failures) in zip(
                entries, found, strict=True
            )
        ]

    def _entries(self, key: str) -> list[list[str]]:
        """Execution, job and queue of each entry. Members that no worker has written are removed: a
        dead worker would never leave."""
        entries = []
        for entry in self._redis.zrange(key, 0, -1):
            parts = entry.decode(errors="replace").split(" ", 2)
            if len(parts) == 3 and "\ufffd" not in entry.decode(errors="replace"):
                entries.append(parts)
            else:
                logger.error("removed %r from %s in Redis: no worker has written it", entry, key)
                self._redis.zrem(key, entry)
        return entries

    def check(self, leases: Sequence[Lease]) -> list[tuple[bool, bool]]:
        """For each lease: whether it is still held, and whether the job was cancelled."""
        pipeline = self._redis.pipeline(transaction=False)
        for lease in leases:
            pipeline.zscore(rq_layout.wip_key(lease.queue), lease.member)
            pipeline.hget(rq_layout.job_key(lease.job), CANCEL)
        replies = readable(pipeline, unreadable=b"") if leases else []
        return [
            (score is not None, bool(cancel))  # a lease that cannot be read is held
            for score, cancel in zip(replies[::2], replies[1::2], strict=True)
        ]

    # --- returning --------------------------------------------------------------------------------

    def give_back(self, leases: Sequence[Lease], *, undo_attempt: bool = False) -> None:
        """Return jobs to the front of their queues, in their order, without using a retry: no death
        counts. `undo_attempt`: the attempt has published nothing and does not count either."""
        self._return_all((lease, {"undo_attempt": int(undo_attempt)}) for lease in leases)

    def reclaim(self, jobs: Sequence[StartedJob]) -> None:
        """Return jobs, in their order, to the front of their queues; those with a group to the
        front of the quarantine. Their counts of deaths become `lost`, and their failures are
        written. All of them, or none, unless Redis is full."""
        now, _ = self._redis.time()
        self._return_all(
            (
                job.lease,
                {
                    "lost": job.lost,
                    "lost_at": now,
                    "group": job.group,
                    "failures": json.dumps(job.failures),
                },
            )
            for job in jobs
        )

    def hand_on(self, jobs: Sequence[ClaimedJob]) -> None:
        """Move jobs of functions that this worker does not run to the queues of those functions,
        for workers that run them. These attempts do not count."""
        pipeline = self._redis.pipeline(transaction=False)
        for job in jobs:
            assert job.func is not None
            target = keys.queue_for(job.func, job.lease.queue)
            args = self._args(job.lease, "RPUSH", undo_attempt=1, origin=target)
            names = return_keys(job.lease, self._worker, target)
            self._return(keys=names, args=args, client=pipeline)
        pipeline.execute()

    def leave_to(self, lease: Lease, worker: str, tokens: int) -> None:
        """Return a job that needs a context of so many tokens for a worker that has one, without
        using a retry. It waits at the front of its queue, in the order of those that were returned
        so; see longer.lua. The attempt has published nothing and does not count."""
        args = self._args(lease, "LPUSH", undo_attempt=1, longer=f"{tokens} {worker}")
        self._return(keys=return_keys(lease, self._worker), args=args)

    def retry(
        self,
        lease: Lease,
        allowed: int,
        delay: float,
        failures: Sequence[Failure],
        *,
        front: bool = False,
    ) -> bool:
        """Return a job to its queue after an error, in `delay` seconds. `front`: without a delay,
        to the front. False if no retry is left."""
        push = "LPUSH" if front else "RPUSH"
        return self._return_failed(lease, push, RETRIED, allowed, delay, failures)

    def return_after_machine_error(
        self, lease: Lease, delay: float, failures: Sequence[Failure]
    ) -> bool:
        """Return a job to the end of its queue in `delay` seconds, because this machine could not
        run it, without using a retry. False if that has happened MAX_MACHINE_ERRORS times."""
        return self._return_failed(
            lease, "RPUSH", MACHINE_ERRORS, MAX_MACHINE_ERRORS, delay, failures
        )

    def forget(self, leases: Sequence[Lease]) -> None:
        """Remove lost leases from the jobs that the worker has started."""
        if leases:
            self._redis.zrem(keys.started(self._worker), *(lease.entry for lease in leases))

    def _return_failed(
        self,
        lease: Lease,
        push: str,
        counter: str,
        limit: int,
        delay: float,
        failures: Sequence[Failure],
    ) -> bool:
        args = self._args(
            lease,
            push,
            counter=counter,
            limit=limit,
            delay=round(1000 * delay) or "",
            failures=json.dumps(failures),
        )
        return int(self._return(keys=return_keys(lease, self._worker), args=args)) != 2

    def _return_all(self, returns: Iterable[tuple[Lease, dict[str, Any]]]) -> None:
        """Return jobs to the front, the last one first, so that they keep their order."""
        all_args = [(lease, self._args(lease, "LPUSH", **more)) for lease, more in returns]
        for transaction in (True, False):
            pipeline = self._redis.pipeline(transaction=transaction)
            for lease, args in reversed(all_args):
                self._return(keys=return_keys(lease, self._worker), args=args, client=pipeline)
            try:
                pipeline.execute()
                return
            except OutOfMemoryError:  # a full Redis 7.0 refuses transactions
                if not transaction:
                    raise

    def _args(self, lease: Lease, push: str, **more: Any) -> ReturnArgs:
        return ReturnArgs(*lease_args(lease, self._dead), push, **more)


def _number(value: bytes | None) -> int:
    """A count in a job's hash; 0 for anything else that a producer may have written there."""
    return int(value) if value is not None and value.isdigit() and len(value) < 16 else 0
