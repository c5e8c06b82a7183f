"""The Lua scripts that move a job between RQ's keys, and their KEYS and ARGV by name.

The keys are those of RQ 2.12, so RQ's tools read them (rq/job.py, rq/executions.py, rq/registry.py
and rq/results.py). A started job is a member `<job>:<execution>` of `rq:wip:<queue>`: the lease of
this attempt. The script that ends or returns the job removes it; a script that does not find it
changes nothing.

Each tuple lists the names of the `unpack` line of its script, in the same order. What follows a
tuple of arguments is the script's variable-length tail.
"""

from __future__ import annotations

from typing import NamedTuple

from jobs import keys, lua
from jobs.store import rq_format
from jobs.store.job_end import JOB_END_LUA
from jobs.store.rq_format import ROWS_LUA, TENANTS_LUA
from jobs.store.rq_job import Lease
from jobs.store.rq_workers import DeadWorker

CLAIM = lua.load("jobs.store", "claim", TENANTS_LUA)
LEASE_LUA = lua.load("jobs.store", "lease")  # prelude for scripts that have TENANTS_LUA in front
SETTLE = lua.load("jobs.store", "settle", JOB_END_LUA, LEASE_LUA)
RETURN = lua.load("jobs.store", "return", TENANTS_LUA, ROWS_LUA, LEASE_LUA)


class ClaimKeys(NamedTuple):
    started: str
    workers: str
    limits: str


class ClaimArgs(NamedTuple):
    worker: str
    execution_prefix: str
    now_text: str
    now_seconds: float
    score: float
    take_suspects: int
    fields: str
    limit_names: str


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


class SettleKeys(NamedTuple):
    wip: str
    execution: str
    executions: str
    started: str
    workers: str
    worker: str


class SettleArgs(NamedTuple):
    job_id: str
    execution_id: str
    entry: str
    dead: str
    seen_lease: int
    counter: str
    working_time: float


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


def lease_keys(lease: Lease, worker: str) -> LeaseKeys:
    """The keys of a lease that `worker` has."""
    return LeaseKeys(
        wip=rq_format.wip_key(lease.queue),
        execution=rq_format.execution_key(lease.job, lease.execution),
        executions=rq_format.executions_key(lease.job),
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
        job=rq_format.job_key(lease.job),
        queue=rq_format.queue_key(target),
        quarantine=keys.quarantine(target),
        scheduled=rq_format.scheduled_key(target),
        open_bytes=keys.OPEN_BYTES,
        old_queue=rq_format.queue_key(lease.queue),
    )
