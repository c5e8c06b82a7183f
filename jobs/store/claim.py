"""Claims jobs: moves them from the front of their queues to started, in the name of one worker."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import redis
from redis import Redis

from jobs import clock, keys, lua
from jobs.errors import JobError, failure_of
from jobs.store import rq_layout
from jobs.store.claimed_job import FIELDS, ClaimedJob, Lease, read
from jobs.store.damage import Damaged, damage_of, readable
from jobs.store.limits import DEFAULTS, Limits, parse_limits
from jobs.store.preludes import (
    AFFINITY_LUA,
    LONGER_LUA,
    QUEUE_LUA,
    STATUSES_LUA,
    TENANT_RUNNING_LUA,
)
from jobs.store.turns import BEGIN, begin_script, read_history, session_of

CLAIM = lua.load(
    "jobs.store",
    "claim",
    *(QUEUE_LUA, TENANT_RUNNING_LUA, STATUSES_LUA, AFFINITY_LUA, LONGER_LUA),
)

LEASE_SCORE_SECONDS = 10 * 365 * 86_400  # RQ's own clean-up must never see an expired lease


# KEYS and ARGV of claim.lua, by name and in order.


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


class Claim(NamedTuple):
    """The jobs that were taken. `held_seconds`: until jobs may be taken that this claim has left to
    other workers; infinity if there are none."""

    jobs: list[ClaimedJob]
    held_seconds: float


class Claims:
    """Claims jobs in the name of one worker, and begins the turns of those of sessions."""

    def __init__(self, redis: Redis, worker: str) -> None:
        self._redis: Any = redis  # its stubs type neither pipelines nor replies as bytes
        self._worker = worker
        self._keys = ClaimKeys(keys.started(worker), keys.WORKERS, keys.LIMITS)
        self._claim = redis.register_script(CLAIM)
        self._begin_turn = redis.register_script(BEGIN)
        self._known_limits = DEFAULTS  # while another program has written their key

    def claim(
        self,
        queues: Sequence[str],
        room: Sequence[int],
        contexts: Sequence[int],
        *,
        suspects: bool,
    ) -> Claim:
        """Take jobs from the front of the queues, those of the first queues first. `room`: of each
        queue, in sequences; a job is taken while there is any. `contexts`: of each queue, the
        tokens that a sequence may have, 0 if that is not known: jobs that need more are left to
        workers that have it. `suspects`: take a group of suspects instead, if any wait."""
        if not queues:
            return Claim([], math.inf)
        moment = time.time()
        args = ClaimArgs(
            worker=self._worker,
            execution_prefix=uuid.uuid4().hex,
            now_text=rq_layout.format_time(),
            now_seconds=moment,
            score=moment + LEASE_SCORE_SECONDS,
            take_suspects=int(suspects),
            fields=" ".join(FIELDS),
            limit_names=" ".join(Limits._fields),
        )
        kinds = (rq_layout.queue_key, rq_layout.wip_key, keys.quarantine)
        names = [*self._keys, *(key(queue) for queue in queues for key in kinds)]
        taken: list[Any] = []
        left, held = 1, -1
        while left and not taken:  # each call looks at some tenants only
            taken, left, held, now, stored = self._claim(keys=names, args=[*args, *room, *contexts])
        claimed_at = clock.now()
        limits = self._limits(stored)
        claimed = []
        for number, job, attempt, execution, *values in taken:
            queue = queues[number - 1]
            lease = Lease(job.decode(), queue, execution.decode(), int(attempt))
            claimed.append(read(lease, values, claimed_at, limits, float(now)))
        return Claim(self._begin_turns(claimed), held / 1000 if held >= 0 else math.inf)

    def read(self, lease: Lease) -> ClaimedJob:
        """The job of a lease, as its hash is now."""
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.time()
        pipeline.hmget(keys.LIMITS, Limits._fields)
        pipeline.hmget(rq_layout.job_key(lease.job), FIELDS)
        (seconds, microseconds), stored, values = readable(pipeline)
        absent = (None,) * len(FIELDS)
        now = seconds + microseconds / 1e6
        return read(lease, values or absent, clock.now(), self._limits(stored), now)

    def _begin_turns(self, claimed: Sequence[ClaimedJob]) -> list[ClaimedJob]:
        """Begin the turns of jobs of sessions: those get their history, or a fault if their session
        refuses them. The script that ends a job appends its answer."""
        jobs = [job for job in claimed if job.fault is None and session_of(job.request)]
        if not jobs:
            return list(claimed)
        pipeline = self._redis.pipeline(transaction=False)
        for job in jobs:
            name = job.lease.job
            names, args = begin_script(name, rq_layout.job_key(name), job.request)
            self._begin_turn(keys=names, args=args, client=pipeline)
        begun = {
            job.lease: self._with_history(job, reply)
            for job, reply in zip(jobs, pipeline.execute(raise_on_error=False), strict=True)
        }
        return [begun.get(job.lease, job) for job in claimed]

    def _with_history(self, job: ClaimedJob, reply: Any) -> ClaimedJob:
        try:
            if isinstance(reply, Exception):
                raise reply
            return replace(job, history=read_history(job.lease.job, job.request, reply))
        except JobError as error:
            return replace(job, fault=error)
        except Damaged as error:
            return replace(job, fault=self._unreadable(session_of(job.request), error))
        except redis.RedisError:  # Redis restarts, or became a replica: the job runs later
            raise
        except Exception as error:  # its turns are not what a session has: it fails only this job
            return replace(job, fault=failure_of(error))

    def _unreadable(self, name: str, error: Damaged) -> JobError:
        """The script of a session has failed because of a key that another program has written."""
        names = (keys.session(name), keys.turns(name), keys.open_turns(name))
        wrong = damage_of(self._redis, error, names)
        if not wrong:
            return failure_of(error)
        return JobError("internal", f"session {name!r} can't be read: {wrong[0]}")

    def _limits(self, stored: list[bytes | None] | None) -> Limits:
        """The limits by the values of their key; the last ones that were read if it can't be."""
        if stored is not None:
            self._known_limits = parse_limits(stored)
        return self._known_limits
