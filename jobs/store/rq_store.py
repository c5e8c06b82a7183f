"""Claims, settles and returns jobs in RQ's keys, in the name of one worker.

`worker.queue.loop` decides when. Written against RQ 2.12; the contract tests compare the result
with what RQ itself writes and reads.
"""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from redis import Redis
from redis.client import Pipeline

from jobs import clock, keys
from jobs.results.failures import Failure
from jobs.store import rq_format, rq_scripts
from jobs.store.damage import is_damage
from jobs.store.eviction import eviction
from jobs.store.limits import DEFAULTS, Limits, parse_limits
from jobs.store.rq_backlog import Backlog, BacklogCounter
from jobs.store.rq_format import CANCEL
from jobs.store.rq_job import (
    FIELDS,
    MACHINE_ERRORS,
    RETRIED,
    TERMS,
    ClaimedJob,
    Lease,
    read,
    read_terms,
)
from jobs.store.rq_scripts import ClaimArgs, ClaimKeys, ReturnArgs, lease_args, return_keys
from jobs.store.rq_sessions import RQSessions
from jobs.store.rq_settle import Settlement, Settler
from jobs.store.rq_upkeep import Upkeep
from jobs.store.rq_workers import DeadWorker

LEASE_SCORE_SECONDS = 10 * 365 * 86_400  # RQ's own clean-up must never see an expired lease
SOON = 70.0  # more than the longest pause before a retry
MAX_MACHINE_ERRORS = 20  # machines that may fail to run a job before it fails


class RQStore:
    """The jobs of the models' queues in one Redis."""

    def __init__(self, redis: Redis, models: Sequence[str], worker: str, worker_key: str) -> None:
        self._redis: Any = redis  # its stubs type neither pipelines nor replies as bytes
        self._models = list(models)
        self._worker = worker
        interactive = [keys.chat_queue(model) for model in models]
        self.queues = interactive + [keys.bulk_queue(model) for model in models]
        self._waiting_keys = [rq_format.queue_key(queue) for queue in self.queues]
        for key in (keys.quarantine, keys.tenants, rq_format.scheduled_key):
            self._waiting_keys += [key(queue) for queue in self.queues]
        self._claim = redis.register_script(rq_scripts.CLAIM)
        self._settler = Settler(redis, worker, worker_key)
        self._return = redis.register_script(rq_scripts.RETURN)
        self.limits = DEFAULTS  # as of the last claim
        self.held_seconds = math.inf  # until jobs may be taken that the last claim left to others
        self.upkeep = Upkeep(redis, self.queues)
        self._sessions = RQSessions(redis)
        self._backlog = BacklogCounter(redis)

    def model_of(self, lease: Lease) -> tuple[str, bool]:
        """The model, by the name in the job's queue, and whether that is the queue of bulk jobs."""
        number = self.queues.index(lease.queue)
        return self._models[number % len(self._models)], number >= len(self._models)

    # --- writing ----------------------------------------------------------------------------------

    def claim(
        self, room: Callable[[str, bool], int], *, suspects: bool = False
    ) -> list[ClaimedJob]:
        """Take jobs, interactive ones before bulk ones. `room(model, bulk)`: how many at most.
        `suspects`: take a group of suspects instead, if any wait."""
        moment = time.time()
        args = ClaimArgs(
            worker=self._worker,
            execution_prefix=uuid.uuid4().hex,
            now_text=rq_format.format_time(),
            now_seconds=moment,
            score=moment + LEASE_SCORE_SECONDS,
            take_suspects=int(suspects),
            fields=" ".join((*FIELDS, *TERMS)),
            limit_names=" ".join(Limits._fields),
        )
        lists = [
            key
            for queue in self.queues
            for key in (
                rq_format.queue_key(queue),
                rq_format.wip_key(queue),
                keys.quarantine(queue),
            )
        ]
        claim_keys = ClaimKeys(
            started=keys.started(self._worker),
            workers=keys.WORKERS,
            limits=keys.LIMITS,
        )
        capacity = [room(model, bulk) for bulk in (False, True) for model in self._models]
        taken: list[Any] = []
        left, held = 1, -1
        while left and not taken:  # each call looks at some tenants only
            taken, left, held, now, limits = self._claim(
                keys=[*claim_keys, *lists], args=[*args, *capacity]
            )
        claimed_at = clock.now()
        self.held_seconds = held / 1000 if held >= 0 else math.inf
        if limits is not None:  # else those of the last claim
            self.limits = parse_limits(limits)
        claimed = []
        for number, job, attempt, execution, *values in taken:
            queue = self.queues[number - 1]
            lease = Lease(job.decode(), queue, execution.decode(), int(attempt))
            claimed.append(self._read(lease, values, claimed_at, float(now)))
        return self._sessions.begin(claimed)

    def _read(
        self, lease: Lease, values: Sequence[bytes | None], claimed_at: float, now: float
    ) -> ClaimedJob:
        """The job of a lease from the values of FIELDS and TERMS. `now`: the time of Redis."""
        terms = read_terms(values[len(FIELDS) :], now)
        ahead = now - claimed_at
        return read(lease, values[: len(FIELDS)], claimed_at, terms, self.limits, ahead)

    def settle(
        self, settlements: Sequence[Settlement], dead: DeadWorker | None = None
    ) -> list[bool]:
        """End jobs in one round trip; False for each whose lease is lost. `dead`: the worker whose
        jobs these are; nothing is changed if it turns out to be alive."""
        pipeline = self._redis.pipeline(transaction=False)
        for settlement in settlements:
            self._settler.send(settlement, dead, pipeline)
        return [bool(reply) for reply in pipeline.execute()]

    def ping(self) -> None:
        """Raise redis.RedisError unless Redis replies."""
        self._redis.ping()

    def give_back(self, leases: Sequence[Lease], *, undo_attempt: bool = False) -> None:
        """Return jobs to the front of their queues, in their order, without using a retry.
        `undo_attempt`: the attempt has published nothing and does not count either."""
        pipeline = self._redis.pipeline(transaction=False)
        for lease in reversed(leases):
            self._return_one(lease, "LPUSH", undo_attempt=int(undo_attempt), client=pipeline)
        pipeline.execute()

    def hand_on(self, jobs: Sequence[ClaimedJob]) -> None:
        """Move jobs of functions that this worker does not run to the queues of those functions,
        for workers that run them. These attempts do not count."""
        pipeline = self._redis.pipeline(transaction=False)
        for job in jobs:
            assert job.func is not None
            target = keys.queue_for(job.func, job.lease.queue)
            self._return_one(
                job.lease, "RPUSH", target, undo_attempt=1, origin=target, client=pipeline
            )
        pipeline.execute()

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
        reply = self._return_one(
            lease,
            "LPUSH" if front else "RPUSH",
            counter=RETRIED,
            limit=allowed,
            delay=round(1000 * delay) or "",
            failures=json.dumps(failures),
        )
        return int(reply) != 2

    def return_after_machine_error(
        self, lease: Lease, delay: float, failures: Sequence[Failure]
    ) -> bool:
        """Return a job to the end of its queue in `delay` seconds, because this machine could not
        run it, without using a retry. False if that has happened MAX_MACHINE_ERRORS times."""
        reply = self._return_one(
            lease,
            "RPUSH",
            counter=MACHINE_ERRORS,
            limit=MAX_MACHINE_ERRORS,
            delay=round(1000 * delay) or "",
            failures=json.dumps(failures),
        )
        return int(reply) != 2

    def forget(self, leases: Sequence[Lease]) -> None:
        """Remove lost leases from the jobs that this worker has started."""
        if leases:
            self._redis.zrem(keys.started(self._worker), *(lease.entry for lease in leases))

    # --- reading ----------------------------------------------------------------------------------

    def any_waiting(self) -> bool:
        """True if a job waits in the queues, in quarantine or for its time."""
        return bool(self._redis.exists(*self._waiting_keys))

    def any_unsettled(self) -> bool:
        """True if any worker has claimed a job of the queues, or the last claim has left one to
        another worker, a suspect waits, or a job is due within SOON seconds, as after an error."""
        if self.held_seconds < math.inf:
            return True
        now, _ = self._redis.time()
        soon = now + SOON
        pipeline = self._redis.pipeline(transaction=False)
        for queue in self.queues:
            pipeline.zcard(rq_format.wip_key(queue))
            pipeline.llen(keys.quarantine(queue))
            pipeline.zcount(rq_format.scheduled_key(queue), "-inf", soon)
        return any(_readable(pipeline))

    def suspects(self) -> set[str]:
        """The queues whose suspects wait for an idle worker."""
        pipeline = self._redis.pipeline(transaction=False)
        for queue in self.queues:
            pipeline.exists(keys.quarantine(queue))
        found = zip(self.queues, pipeline.execute(), strict=True)
        return {queue for queue, waits in found if waits}

    def read(self, lease: Lease) -> ClaimedJob:
        """The job of a lease, as its hash is now."""
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.time()
        pipeline.hmget(keys.LIMITS, Limits._fields)
        pipeline.hmget(rq_format.job_key(lease.job), (*FIELDS, *TERMS))
        (seconds, microseconds), limits, values = _readable(pipeline)
        if limits is not None:
            self.limits = parse_limits(limits)
        absent = (None,) * len((*FIELDS, *TERMS))
        return self._read(lease, values or absent, clock.now(), seconds + microseconds / 1e6)

    def check(self, leases: Sequence[Lease]) -> list[tuple[bool, bool]]:
        """For each lease: whether it is still held, and whether the job was cancelled."""
        pipeline = self._redis.pipeline(transaction=False)
        for lease in leases:
            pipeline.zscore(rq_format.wip_key(lease.queue), lease.member)
            pipeline.hget(rq_format.job_key(lease.job), CANCEL)
        replies = _readable(pipeline, unreadable=b"") if leases else []
        return [
            (score is not None, bool(cancel))  # a lease that cannot be read is held
            for score, cancel in zip(replies[::2], replies[1::2], strict=True)
        ]

    def eviction(self) -> str:
        """Why Redis may evict keys, and what to do; "" if it can't."""
        return eviction(self._redis.info("memory"))

    def backlog(self) -> Backlog:
        """The rows that wait for Parquet."""
        return self._backlog.read()

    # --- scripts ----------------------------------------------------------------------------------

    def _return_one(
        self,
        lease: Lease,
        push: str,
        target: str | None = None,
        *,
        client: Pipeline | None = None,
        **more: Any,
    ) -> Any:
        args = ReturnArgs(*lease_args(lease, None), push, **more)
        return self._return(keys=return_keys(lease, self._worker, target), args=args, client=client)


def _readable(pipeline: Any, unreadable: Any = None) -> list[Any]:
    """The replies to the commands of a pipeline; `unreadable` for a key of another type."""
    replies = pipeline.execute(raise_on_error=False)
    for reply in replies:
        if isinstance(reply, Exception) and not is_damage(reply):
            raise reply
    return [unreadable if isinstance(reply, Exception) else reply for reply in replies]
