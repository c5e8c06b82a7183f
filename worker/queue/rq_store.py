"""Claims, settles and returns jobs in RQ's keys, in the name of one worker.

All contact with RQ's job and queue keys is here and in rq_scripts.py; loop.py decides when. Written
against RQ 2.12; the contract tests compare the result with what RQ itself writes and reads.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from redis import Redis
from redis.client import Pipeline

from jobs import keys
from jobs.client import rq_format
from jobs.client.limits import DEFAULTS, Limits, parse_limits
from jobs.client.rq_format import ATTEMPT, CANCEL, integer
from worker.queue import rq_scripts
from worker.queue.rq_job import (
    FIELDS,
    LOST,
    RETRIED,
    TERMS,
    ClaimedJob,
    Lease,
    Terms,
    read,
    read_terms,
)
from worker.queue.rq_scripts import ClaimArgs, ReturnArgs, ReturnKeys
from worker.queue.rq_settle import Settlement, Settler
from worker.queue.rq_upkeep import Upkeep

LEASE_SCORE_SECONDS = 10 * 365 * 86_400  # RQ's own clean-up must never see an expired lease
MAX_LOST = 3  # workers that may die with a job before it fails


@dataclass(frozen=True, slots=True)
class StartedJob:
    """A job that a worker has claimed. `alive`: that worker's own lease has not expired."""

    lease: Lease
    worker: str
    alive: bool


class RQStore:
    """The jobs of the models' queues in one Redis."""

    def __init__(self, redis: Redis, models: Sequence[str], worker: str, worker_key: str) -> None:
        self._redis: Any = redis  # its stubs type neither pipelines nor replies as bytes
        self._models = list(models)
        self._worker = worker
        interactive = [keys.chat_queue(model) for model in models]
        self.queues = interactive + [keys.bulk_queue(model) for model in models]
        self._claim = redis.register_script(rq_scripts.CLAIM)
        self._settler = Settler(redis, worker, worker_key)
        self._return = redis.register_script(rq_scripts.RETURN)
        self.limits = DEFAULTS  # as of the last claim
        self.upkeep = Upkeep(redis, self.queues)

    def model_of(self, lease: Lease) -> str:
        """The model, by the name in the job's queue."""
        return self._models[self.queues.index(lease.queue) % len(self._models)]

    # --- writing ----------------------------------------------------------------------------------

    def claim(self, room: Mapping[str, int]) -> list[ClaimedJob]:
        """Take at most `room[model]` jobs of each model, interactive ones before bulk ones."""
        moment = time.time()
        args = ClaimArgs(
            worker=self._worker,
            execution_prefix=uuid.uuid4().hex,
            now_text=rq_format.format_time(),
            now_seconds=moment,
            score=moment + LEASE_SCORE_SECONDS,
        )
        queues_and_wips = [
            key
            for queue in self.queues
            for key in (rq_format.queue_key(queue), rq_format.wip_key(queue))
        ]
        rooms = [room[model] for model in self._models]
        taken = self._claim(keys=queues_and_wips, args=[*args, *rooms])
        terms = self._read_terms([job.decode() for _, job, *_ in taken])
        claimed = []
        for (number, job, attempt, execution, *values), own in zip(taken, terms, strict=True):
            queue = self.queues[number - 1]
            lease = Lease(job.decode(), queue, execution.decode(), int(attempt))
            claimed.append(read(lease, values, moment, own, self.limits))
        return claimed

    def _read_terms(self, jobs: Sequence[str]) -> list[Terms]:
        """The time limits and retries of claimed jobs; also reads the operator's limits."""
        if not jobs:
            return []
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.time()
        pipeline.hmget(keys.LIMITS, Limits._fields)
        for job in jobs:
            pipeline.hmget(rq_format.job_key(job), TERMS)
        (seconds, microseconds), limits, *found = pipeline.execute()
        self.limits = parse_limits(limits)
        return [read_terms(values, seconds + microseconds / 1e6) for values in found]

    def settle(self, settlements: Sequence[Settlement], dead: str | None = None) -> list[bool]:
        """End jobs in one round trip; False for each whose lease is lost. `dead`: name of a worker
        whose jobs these are; nothing is changed if it turns out to be alive."""
        pipeline = self._redis.pipeline(transaction=False)
        for settlement in settlements:
            self._settler.send(settlement, dead, pipeline)
        return [bool(reply) for reply in pipeline.execute()]

    def ping(self) -> None:
        """Raise redis.RedisError unless Redis replies."""
        self._redis.ping()

    def give_back(self, leases: Sequence[Lease], *, uncount: bool = False) -> None:
        """Return jobs to the front of their queues, in their order, without using a retry.
        `uncount`: the attempt has published nothing and does not count either."""
        pipeline = self._redis.pipeline(transaction=False)
        for lease in reversed(leases):
            self._return_one(lease, "LPUSH", uncount=uncount, client=pipeline)
        pipeline.execute()

    def retry(self, lease: Lease, allowed: int) -> bool:
        """Return a job to the end of its queue after an error. False if no retry is left."""
        reply = self._return_one(lease, "RPUSH", counter=RETRIED, limit=allowed)
        return int(reply) != 2

    def reclaim(self, lease: Lease, dead: str | None) -> bool:
        """Return a job whose worker died while it ran it: the worker named `dead`, or this one if
        None. False if MAX_LOST workers have died with it."""
        reply = self._return_one(lease, "LPUSH", counter=LOST, limit=MAX_LOST - 1, dead=dead)
        return int(reply) != 2

    # --- reading ----------------------------------------------------------------------------------

    def started(self, queue: str) -> list[StartedJob]:
        """The started jobs of a queue, in the order of their claims."""
        members = [
            member.decode(errors="replace")
            for member in self._redis.zrange(rq_format.wip_key(queue), 0, -1)
        ]
        split = [member.rpartition(":") for member in members]
        pipeline = self._redis.pipeline(transaction=False)
        for job, _, execution in split:
            pipeline.hget(rq_format.execution_key(job, execution), "worker_name")
            pipeline.hget(rq_format.job_key(job), ATTEMPT)
        replies = pipeline.execute() if split else []
        names = [(name or b"").decode(errors="replace") for name in replies[::2]]
        alive = self._alive(set(names))
        return [
            StartedJob(Lease(job, queue, execution, integer(attempt, 0)), name, alive[name])
            for (job, _, execution), name, attempt in zip(split, names, replies[1::2], strict=True)
        ]

    def any_started(self) -> bool:
        """Whether any worker has claimed a job of the queues."""
        pipeline = self._redis.pipeline(transaction=False)
        for queue in self.queues:
            pipeline.zcard(rq_format.wip_key(queue))
        return any(pipeline.execute())

    def read(self, lease: Lease) -> ClaimedJob:
        """The job of a lease, as its hash is now."""
        values = self._redis.hmget(rq_format.job_key(lease.job), FIELDS)
        return read(lease, values, time.time(), Terms(), self.limits)

    def check(self, leases: Sequence[Lease]) -> list[tuple[bool, bool]]:
        """For each lease: whether it is still held, and whether the job was cancelled."""
        pipeline = self._redis.pipeline(transaction=False)
        for lease in leases:
            pipeline.zscore(rq_format.wip_key(lease.queue), lease.member)
            pipeline.hget(rq_format.job_key(lease.job), CANCEL)
        replies = pipeline.execute() if leases else []
        return [
            (score is not None, bool(cancel))
            for score, cancel in zip(replies[::2], replies[1::2], strict=True)
        ]

    def waiting_rows(self) -> int:
        """Number of rows in the outboxes of all runs."""
        runs = self._redis.smembers(keys.OUTBOXES)
        pipeline = self._redis.pipeline(transaction=False)
        for run in runs:
            pipeline.xlen(keys.outbox(run.decode(errors="replace")))
        return sum(pipeline.execute()) if runs else 0

    def _alive(self, names: set[str]) -> dict[str, bool]:
        pipeline = self._redis.pipeline(transaction=False)
        for name in names:
            pipeline.exists(keys.worker(name))
        return dict(zip(names, map(bool, pipeline.execute()), strict=True)) if names else {}

    # --- scripts ----------------------------------------------------------------------------------

    def _return_one(
        self,
        lease: Lease,
        push: Literal["LPUSH", "RPUSH"],
        *,
        counter: str = "",
        limit: int = 0,
        dead: str | None = None,
        uncount: bool = False,
        client: Pipeline | None = None,
    ) -> Any:
        script_keys = ReturnKeys(
            job=rq_format.job_key(lease.job),
            wip=rq_format.wip_key(lease.queue),
            execution=rq_format.execution_key(lease.job, lease.execution),
            executions=rq_format.executions_key(lease.job),
            queue=rq_format.queue_key(lease.queue),
            absent_lease=keys.worker(dead or ""),
        )
        args = ReturnArgs(
            job_id=lease.job,
            execution_id=lease.execution,
            check_absent=int(dead is not None),
            push=push,
            counter=counter,
            limit=limit,
            uncount=int(uncount),
        )
        return self._return(keys=script_keys, args=args, client=client)
