"""Sessions for workers: the history of claimed jobs, and jobs that wait for their session."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import redis
from redis import Redis

from jobs import keys, lua
from jobs.client import rq_format
from jobs.client.damage import is_damage, wrong_types
from jobs.client.rq_format import TENANTS_LUA
from jobs.client.turns import BEGIN, SESSION, TURNS_LUA, begin_script, read_history, session_of
from jobs.errors import JobError, failure_of
from worker.queue.rq_job import ClaimedJob

logger = logging.getLogger(__name__)

RELEASE = lua.load("worker.queue", "release_turn", TENANTS_LUA, TURNS_LUA)


# KEYS and ARGV of release_turn.lua, by name and in order.


class ReleaseTurnKeys(NamedTuple):
    job: str
    open: str


class ReleaseTurnArgs(NamedTuple):
    job_id: str
    name: str


class RQSessions:
    """The sessions in one Redis. Answers are appended by the script that settles a job."""

    def __init__(self, redis: Redis) -> None:
        self._redis: Any = redis
        self._begin = redis.register_script(BEGIN)
        self._release = redis.register_script(RELEASE)

    def begin(self, claimed: Sequence[ClaimedJob]) -> list[ClaimedJob]:
        """The claimed jobs, those of sessions with their history, or with a fault if their session
        refuses them."""
        jobs = [job for job in claimed if job.fault is None and session_of(job.request)]
        if not jobs:
            return list(claimed)
        pipeline = self._redis.pipeline(transaction=False)
        for job in jobs:
            name = job.lease.job
            names, args = begin_script(name, rq_format.job_key(name), job.request)
            self._begin(keys=names, args=args, client=pipeline)
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
        except redis.RedisError as error:
            if not is_damage(error):  # Redis restarts, or became a replica: the job runs later
                raise
            return replace(job, fault=self._unreadable(session_of(job.request), error))
        except Exception as error:  # its turns are not what a session has: it fails only this job
            return replace(job, fault=failure_of(error))

    def _unreadable(self, name: str, error: redis.RedisError) -> JobError:
        """The script of a session has failed because of a key that another program has written."""
        names = (keys.session(name), keys.turns(name), keys.open_turns(name))
        wrong = wrong_types(self._redis, names)
        if not wrong:
            return failure_of(error)
        return JobError("internal", f"session {name!r} can't be read: {wrong[0]}")

    def release(self, deferred: Sequence[bytes]) -> None:
        """Queue those of the deferred jobs whose session is free or gone: RQ's own tools may have
        removed the job before them, or they waited longer than the session was kept."""
        ids = [name.decode(errors="replace") for name in deferred]
        pipeline = self._redis.pipeline(transaction=False)
        for job in ids:
            pipeline.hget(rq_format.job_key(job), SESSION)
        found = pipeline.execute(raise_on_error=False) if ids else []
        for job, session in zip(ids, found, strict=True):
            if isinstance(session, bytes):
                name = session.decode(errors="replace")
                names = ReleaseTurnKeys(rq_format.job_key(job), keys.open_turns(name))
                try:
                    self._release(keys=names, args=ReleaseTurnArgs(job, name))
                except redis.ResponseError as error:
                    if not is_damage(error):
                        raise
                    logger.error("job %s waits for session %s, whose keys are foreign", job, name)
