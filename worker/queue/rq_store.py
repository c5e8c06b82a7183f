"""RQ's books, as far as we write them: claiming, settling and returning jobs.

All contact with RQ's keys is here and in lua.py; loop.py decides when. Written
against RQ 2.12; the contract tests hold it against RQ's own readers.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from redis import Redis
from redis.client import Pipeline
from rq import Queue
from rq.job import Job as RQJob
from rq.registry import (
    BaseRegistry,
    CanceledJobRegistry,
    FailedJobRegistry,
    FinishedJobRegistry,
    StartedJobRegistry,
)
from rq.results import Result
from rq.serializers import JSONSerializer
from rq.utils import now, utcformat

from jobs import keys
from jobs.client.rq_format import ATTEMPT, CANCEL, results_key
from jobs.errors import JobError
from jobs.stream.entries import end_id, end_payload
from worker.queue import lua
from worker.queue.rq_job import ClaimedJob, Lease, read

logger = logging.getLogger(__name__)

WIP_SECONDS = 10 * 365 * 86_400  # RQ's own clean-up must never think that a lease has expired
MAX_LOST = 3  # workers that may die with a job before it is failed
MAX_RESULTS = 10  # results that RQ keeps of one job


@dataclass(frozen=True, slots=True)
class Settlement:
    """How a job ends: what goes into RQ's books, the outbox and the stream."""

    claimed: ClaimedJob
    run: str
    row: str  # outbox.encode(…)
    completion: dict[str, Any] | None  # ChatCompletion's JSON
    error: JobError | None

    @property
    def lease(self) -> Lease:
        return self.claimed.lease


@dataclass(frozen=True, slots=True)
class Started:
    """A job that some worker has. `alive`: the worker holds its own lease."""

    lease: Lease
    worker: str
    alive: bool


class RQStore:
    """The books of one Redis, written in the name of one worker."""

    def __init__(self, redis: Redis, models: Sequence[str], worker: str, worker_key: str) -> None:
        self._redis: Any = redis  # its stubs know neither pipelines' nor bytes' ways
        self._models = list(models)
        self._worker, self._worker_key = worker, worker_key
        chats = [keys.chat_queue(model) for model in models]
        self.queues = chats + [keys.bulk_queue(model) for model in models]
        self._claim = redis.register_script(lua.CLAIM)
        self._settle = redis.register_script(lua.SETTLE)
        self._return = redis.register_script(lua.RETURN)

    def model_of(self, lease: Lease) -> str:
        """The model, by the name that the job's queue has."""
        return self._models[self.queues.index(lease.queue) % len(self._models)]

    def claim(self, room: Mapping[str, int]) -> list[ClaimedJob]:
        """Take jobs from the front of the queues, at most `room[model]` of each model; those that
        somebody waits for before bulk ones."""
        moment = time.time()
        rows = self._claim(
            keys=[key for queue in self.queues for key in (_queue_key(queue), _wip_key(queue))],
            args=[
                self._worker,
                uuid.uuid4().hex,
                utcformat(now()),
                moment,
                moment + WIP_SECONDS,
                *(room[model] for model in self._models),
            ],
        )
        claimed = []
        for number, job, attempt, execution, *values in rows:
            queue = self.queues[number - 1]
            lease = Lease(job.decode(), queue, execution.decode(), int(attempt))
            claimed.append(read(lease, values, moment))
        return claimed

    def settle(self, settlements: Sequence[Settlement], absent: str | None = None) -> list[bool]:
        """End jobs in one round trip; False for each whose lease is lost. `absent`: the name of a
        worker that must have lost its own lease."""
        pipeline = self._redis.pipeline(transaction=False)
        for settlement in settlements:
            self._settle_one(settlement, absent, pipeline)
        answers = pipeline.execute()
        for settlement, answer in zip(settlements, answers, strict=True):
            if answer > 1:
                self._enqueue_dependents(settlement.lease)
        return [bool(answer) for answer in answers]

    def give_back(self, leases: Sequence[Lease], *, begun: bool = True) -> None:
        """Put jobs back to the front of their queues, in their order, no retry spent. Without
        `begun` the attempt doesn't count either: nothing of it has been seen."""
        pipeline = self._redis.pipeline(transaction=False)
        for lease in reversed(leases):
            self._return_one(lease, "LPUSH", begun=begun, client=pipeline)
        pipeline.execute()

    def retry(self, lease: Lease, allowed: int) -> bool:
        """Queue a job again after an error, at the back. False if its retries are used up."""
        answer = self._return_one(lease, "RPUSH", counter=lua.RETRIED, limit=allowed)
        return int(answer) != 2

    def reclaim(self, lease: Lease, dead: str | None) -> bool:
        """Return a job whose worker died with it: this one, or another named `dead`. False if it
        was one worker too many."""
        answer = self._return_one(lease, "LPUSH", counter=lua.LOST, limit=MAX_LOST - 1, absent=dead)
        return int(answer) != 2

    def started(self, queue: str) -> list[Started]:
        """All jobs of a queue that some worker has, in the order of their claims."""
        members = [
            member.decode(errors="replace") for member in self._redis.zrange(_wip_key(queue), 0, -1)
        ]
        split = [member.rpartition(":") for member in members]
        pipeline = self._redis.pipeline(transaction=False)
        for job, _, execution in split:
            pipeline.hget(_execution_key(job, execution), "worker_name")
            pipeline.hget(RQJob.key_for(job), ATTEMPT)
        found = pipeline.execute() if split else []
        names = [(name or b"").decode() for name in found[::2]]
        alive = self._alive(set(names))
        return [
            Started(Lease(job, queue, execution, int(attempt or 0)), name, alive[name])
            for (job, _, execution), name, attempt in zip(split, names, found[1::2], strict=True)
        ]

    def busy(self) -> bool:
        """Whether any worker has a job of the queues."""
        pipeline = self._redis.pipeline(transaction=False)
        for queue in self.queues:
            pipeline.zcard(_wip_key(queue))
        return any(pipeline.execute())

    def read(self, lease: Lease) -> ClaimedJob:
        """The job of a lease, as its hash has it now."""
        values = self._redis.hmget(RQJob.key_for(lease.job), lua.FIELDS)
        return read(lease, values, time.time())

    def check(self, leases: Sequence[Lease]) -> list[tuple[bool, bool]]:
        """For each lease: whether it is still held, and whether the job shall be cancelled."""
        pipeline = self._redis.pipeline(transaction=False)
        for lease in leases:
            pipeline.zscore(_wip_key(lease.queue), lease.member)
            pipeline.hget(RQJob.key_for(lease.job), CANCEL)
        found = pipeline.execute() if leases else []
        return [
            (score is not None, bool(cancel))
            for score, cancel in zip(found[::2], found[1::2], strict=True)
        ]

    def waiting_rows(self) -> int:
        """Rows on their way to Parquet, of all runs."""
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

    def _settle_one(self, settlement: Settlement, absent: str | None, client: Pipeline) -> None:
        claimed, error = settlement.claimed, settlement.error
        lease, moment = claimed.lease, now()
        registry: type[BaseRegistry]
        if settlement.completion is not None:
            status, kind, registry = "finished", Result.Type.SUCCESSFUL, FinishedJobRegistry
        elif error is not None and error.code == "cancelled":
            status, kind, registry = "canceled", Result.Type.STOPPED, CanceledJobRegistry
        else:
            status, kind, registry = "failed", Result.Type.FAILED, FailedJobRegistry
        keep = claimed.result_ttl if status == "finished" else claimed.failure_ttl
        answer = settlement.completion
        result = Result(
            lease.job,
            kind,
            connection=None,  # type: ignore[arg-type]
            return_value=answer,
            exc_string=_encodable(str(error)) if error is not None else None,
            worker_name=self._worker,
            serializer=JSONSerializer,
            execution_id=lease.execution,
        )
        usage = answer["usage"] if answer is not None else None
        reason = answer["choices"][0]["finish_reason"] if answer is not None else None
        ended = "cancelled" if status == "canceled" else "error"
        self._settle(
            keys=[
                RQJob.key_for(lease.job),
                _wip_key(lease.queue),
                _execution_key(lease.job, lease.execution),
                f"rq:executions:{lease.job}",
                registry.key_template.format(lease.queue),
                results_key(lease.job),
                keys.outbox(settlement.run),
                keys.OUTBOXES,
                keys.log(lease.job),
                keys.live(lease.job),
                self._worker_key,
                keys.worker(absent or ""),
            ],
            args=[
                lease.job,
                lease.execution,
                status,
                utcformat(moment),
                keep,
                "+inf" if keep < 0 else int(moment.timestamp()) + keep,
                json.dumps(error.to_dict()) if error is not None else "",
                settlement.row,
                settlement.run,
                end_id(lease.attempt),
                end_payload(reason or ended, usage, error),  # type: ignore[arg-type]
                {"finished": "successful_job_count", "failed": "failed_job_count"}.get(status, ""),
                MAX_RESULTS,
                "" if absent is None else "1",
                int(moment.timestamp()),
                max(0.0, moment.timestamp() - claimed.claimed_at),
                *chain.from_iterable(result.serialize().items()),
            ],
            client=client,
        )

    def _return_one(
        self,
        lease: Lease,
        side: str,
        *,
        counter: str = "",
        limit: int = 0,
        absent: str | None = None,
        begun: bool = True,
        client: Pipeline | None = None,
    ) -> Any:
        return self._return(
            keys=[
                RQJob.key_for(lease.job),
                _wip_key(lease.queue),
                _execution_key(lease.job, lease.execution),
                f"rq:executions:{lease.job}",
                _queue_key(lease.queue),
                keys.worker(absent or ""),
            ],
            args=[
                lease.job,
                lease.execution,
                side,
                counter,
                limit,
                "0" if absent is None else "1",
                "0" if begun else "1",
            ],
            client=client,
        )

    def _enqueue_dependents(self, lease: Lease) -> None:
        """Jobs that waited for this one, of ours or of anybody."""
        try:
            job = RQJob.fetch(lease.job, connection=self._redis, serializer=JSONSerializer)
            queue = Queue(lease.queue, connection=self._redis, serializer=JSONSerializer)
            queue.enqueue_dependents(job)
        except Exception:  # RQ raises what it likes for a job hash that isn't one
            logger.exception("the jobs that depend on job %s could not be queued", lease.job)


def _encodable(text: str) -> str:
    """Half a surrogate pair has no UTF-8, which RQ's result needs."""
    return text.encode("utf-8", "backslashreplace").decode()


def _queue_key(queue: str) -> str:
    return Queue.redis_queue_namespace_prefix + queue


def _wip_key(queue: str) -> str:
    return StartedJobRegistry.key_template.format(queue)


def _execution_key(job: str, execution: str) -> str:
    return f"rq:execution:{job}:{execution}"
