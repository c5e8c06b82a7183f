"""Sessions for workers: the history of claimed jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import redis
from redis import Redis

from jobs import keys
from jobs.errors import JobError, failure_of
from jobs.store import rq_format
from jobs.store.damage import is_damage, wrong_types
from jobs.store.rq_job import ClaimedJob
from jobs.store.turns import BEGIN, begin_script, read_history, session_of


class RQSessions:
    """The sessions in one Redis. Answers are appended by the script that settles a job."""

    def __init__(self, redis: Redis) -> None:
        self._redis: Any = redis
        self._begin = redis.register_script(BEGIN)

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
