"""Sessions for workers: the history of claimed jobs, and jobs that wait for their session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import redis
from redis import Redis

from jobs import keys, lua
from jobs.client import rq_format
from jobs.client.damage import Damaged, is_damage, named, wrong_types
from jobs.client.rq_format import TENANTS_LUA
from jobs.client.turns import BEGIN, SESSION, TURNS_LUA, begin_script, read_history, session_of
from jobs.errors import JobError, failure_of
from worker.queue.rq_job import ClaimedJob

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

    def release(self, job: str, queue: str) -> None:
        """Queue a deferred job whose session is free or gone: RQ's own tools may have removed the
        job before it, or it waited longer than the session was kept. Raises Damaged for a key that
        another program has written."""
        key = rq_format.job_key(job)
        session = self._redis.hget(key, SESSION)
        if session is None:
            return
        name = session.decode(errors="replace")
        try:
            self._release(
                keys=ReleaseTurnKeys(key, keys.open_turns(name)), args=ReleaseTurnArgs(job, name)
            )
        except redis.ResponseError as error:
            if not is_damage(error):
                raise
            names = (keys.session(name), keys.turns(name), keys.open_turns(name))
            found = wrong_types(self._redis, (*names, rq_format.queue_key(queue)))
            if by_script := named(error):
                found.append(by_script)
            if not found:
                raise
            raise Damaged(list(dict.fromkeys(found))) from None
