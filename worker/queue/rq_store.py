"""Claims, settles and returns jobs in RQ's keys, in the name of one worker.

All contact with RQ's job and queue keys is here and in rq_scripts.py; loop.py decides when. Written
against RQ 2.12; the contract tests compare the result with what RQ itself writes and reads.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redis import Redis
from redis.client import Pipeline
from rq import Queue
from rq.job import Job as RQJob
from rq.serializers import JSONSerializer

from jobs import keys
from jobs.client import rq_format
from jobs.client.rq_format import CANCEL
from jobs.encoding import encodable
from jobs.errors import JobError
from jobs.stream.entries import end_id, end_payload
from worker.queue import rq_scripts
from worker.queue.rq_job import FIELDS, MISPLACED, RETRIED, ClaimedJob, Lease, read
from worker.queue.rq_scripts import (
    ClaimArgs,
    ClaimKeys,
    ReturnArgs,
    SettleArgs,
    SettleKeys,
    return_keys,
)
from worker.queue.rq_workers import DeadWorker

logger = logging.getLogger(__name__)

LEASE_SCORE_SECONDS = 10 * 365 * 86_400  # RQ's own clean-up must never see an expired lease
MAX_MISPLACED = 20  # machines that may fail to run a job before it fails
MAX_RESULTS = 10  # results that RQ keeps of one job
WORKER_COUNTERS = {"finished": "successful_job_count", "failed": "failed_job_count"}


@dataclass(frozen=True, slots=True)
class Settlement:
    """How a job ends: what is written to RQ's keys, the outbox and the token stream."""

    claimed: ClaimedJob
    run: str
    row: str  # outbox.encode(…)
    completion: dict[str, Any] | None  # ChatCompletion's JSON
    error: JobError | None

    @property
    def lease(self) -> Lease:
        return self.claimed.lease

    @property
    def status(self) -> rq_format.End:
        if self.completion is not None:
            return "finished"
        if self.error is not None and self.error.code == "cancelled":
            return "canceled"
        return "failed"


class RQStore:
    """The jobs of the models' queues in one Redis."""

    def __init__(self, redis: Redis, models: Sequence[str], worker: str, worker_key: str) -> None:
        self._redis: Any = redis  # its stubs type neither pipelines nor replies as bytes
        self._models = list(models)
        self._worker, self._worker_key = worker, worker_key
        interactive = [keys.chat_queue(model) for model in models]
        self.queues = interactive + [keys.bulk_queue(model) for model in models]
        self.waiting_keys = [rq_format.queue_key(queue) for queue in self.queues]
        self.waiting_keys += [keys.quarantine(queue) for queue in self.queues]
        self._claim = redis.register_script(rq_scripts.CLAIM)
        self._settle = redis.register_script(rq_scripts.SETTLE)
        self._return = redis.register_script(rq_scripts.RETURN)

    def model_of(self, lease: Lease) -> str:
        """The model, by the name in the job's queue."""
        return self._models[self.queues.index(lease.queue) % len(self._models)]

    # --- writing ----------------------------------------------------------------------------------

    def claim(self, room: Mapping[str, int], *, suspects: bool = False) -> list[ClaimedJob]:
        """Take at most `room[model]` jobs of each model, interactive ones before bulk ones.
        `suspects`: take a group of suspects instead, if any wait."""
        moment = time.time()
        args = ClaimArgs(
            worker=self._worker,
            execution_prefix=uuid.uuid4().hex,
            now_text=rq_format.format_time(),
            now_seconds=moment,
            score=moment + LEASE_SCORE_SECONDS,
            take_suspects=int(suspects),
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
        claim_keys = ClaimKeys(keys.started(self._worker), keys.WORKERS)
        rooms = [room[model] for model in self._models]
        claimed = []
        for number, job, attempt, execution, *values in self._claim(
            keys=[*claim_keys, *lists], args=[*args, *rooms]
        ):
            queue = self.queues[number - 1]
            lease = Lease(job.decode(), queue, execution.decode(), int(attempt))
            claimed.append(read(lease, values, moment))
        return claimed

    def settle(
        self, settlements: Sequence[Settlement], dead: DeadWorker | None = None
    ) -> list[bool]:
        """End jobs in one round trip; False for each whose lease is lost. `dead`: the worker whose
        jobs these are; nothing is changed if it turns out to be alive."""
        pipeline = self._redis.pipeline(transaction=False)
        for settlement in settlements:
            self._settle_one(settlement, dead, pipeline)
        replies = pipeline.execute()
        for settlement, reply in zip(settlements, replies, strict=True):
            if reply > 1:
                self._enqueue_dependents(settlement.lease)
        return [bool(reply) for reply in replies]

    def give_back(self, leases: Sequence[Lease], *, uncount: bool = False) -> None:
        """Return jobs to the front of their queues, in their order, without using a retry.
        `uncount`: the attempt has published nothing and does not count either."""
        pipeline = self._redis.pipeline(transaction=False)
        for lease in reversed(leases):
            self._return_one(lease, "LPUSH", uncount=int(uncount), client=pipeline)
        pipeline.execute()

    def retry(self, lease: Lease, allowed: int) -> bool:
        """Return a job to the end of its queue after an error. False if no retry is left."""
        reply = self._return_one(lease, "RPUSH", counter=RETRIED, limit=allowed)
        return int(reply) != 2

    def return_misplaced(self, lease: Lease) -> bool:
        """Return a job to the end of its queue because this machine could not run it, without using
        a retry. False if that has happened MAX_MISPLACED times."""
        reply = self._return_one(lease, "RPUSH", counter=MISPLACED, limit=MAX_MISPLACED)
        return int(reply) != 2

    def forget(self, leases: Sequence[Lease]) -> None:
        """Remove lost leases from the jobs that this worker has started."""
        if leases:
            self._redis.zrem(keys.started(self._worker), *(lease.entry for lease in leases))

    # --- reading ----------------------------------------------------------------------------------

    def any_unsettled(self) -> bool:
        """Whether any worker has claimed a job of the queues, or a suspect waits."""
        pipeline = self._redis.pipeline(transaction=False)
        for queue in self.queues:
            pipeline.zcard(rq_format.wip_key(queue))
            pipeline.llen(keys.quarantine(queue))
        return any(pipeline.execute())

    def suspects(self) -> set[str]:
        """The queues whose suspects wait for an idle worker."""
        pipeline = self._redis.pipeline(transaction=False)
        for queue in self.queues:
            pipeline.exists(keys.quarantine(queue))
        found = zip(self.queues, pipeline.execute(), strict=True)
        return {queue for queue, waits in found if waits}

    def read(self, lease: Lease) -> ClaimedJob:
        """The job of a lease, as its hash is now."""
        values = self._redis.hmget(rq_format.job_key(lease.job), FIELDS)
        return read(lease, values, time.time())

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

    # --- scripts ----------------------------------------------------------------------------------

    def _settle_one(
        self, settlement: Settlement, dead: DeadWorker | None, client: Pipeline
    ) -> None:
        claimed, completion, error = settlement.claimed, settlement.completion, settlement.error
        lease, status, now = claimed.lease, settlement.status, time.time()
        keep = claimed.result_ttl if status == "finished" else claimed.failure_ttl
        usage = completion["usage"] if completion is not None else None
        reason = "cancelled" if status == "canceled" else "error"
        if completion is not None:
            reason = completion["choices"][0]["finish_reason"]
        script_keys = SettleKeys(
            job=rq_format.job_key(lease.job),
            wip=rq_format.wip_key(lease.queue),
            execution=rq_format.execution_key(lease.job, lease.execution),
            executions=rq_format.executions_key(lease.job),
            registry=rq_format.registry_key(lease.queue, status),
            results=rq_format.results_key(lease.job),
            outbox=keys.outbox(settlement.run),
            outboxes=keys.OUTBOXES,
            log=keys.log(lease.job),
            live=keys.live(lease.job),
            worker=self._worker_key,
            started=keys.started(self._worker if dead is None else dead.name),
            workers=keys.WORKERS,
        )
        args = SettleArgs(
            job_id=lease.job,
            execution_id=lease.execution,
            entry=lease.entry,
            dead="" if dead is None else dead.name,
            seen_lease=0 if dead is None else dead.lease,
            status=status,
            ended_at=rq_format.format_time(),
            keep=keep,
            registry_score="+inf" if keep < 0 else int(now) + keep,
            error=json.dumps(error.to_dict()) if error is not None else "",
            row=settlement.row,
            run=settlement.run,
            end_id=end_id(lease.attempt),
            end_payload=end_payload(reason, usage, error),  # type: ignore[arg-type]
            counter=WORKER_COUNTERS.get(status, ""),
            max_results=MAX_RESULTS,
            now=int(now),
            working_time=max(0.0, now - claimed.claimed_at),
        )
        result_fields = rq_format.result_fields(
            lease.job,
            status,
            answer=completion,
            error=encodable(str(error)) if error is not None else None,
            worker=self._worker,
            execution=lease.execution,
        )
        self._settle(keys=script_keys, args=[*args, *result_fields], client=client)

    def _return_one(
        self, lease: Lease, push: str, *, client: Pipeline | None = None, **more: Any
    ) -> Any:
        args = ReturnArgs(lease.job, lease.execution, lease.entry, "", 0, push, **more)
        return self._return(keys=return_keys(lease, self._worker), args=args, client=client)

    def _enqueue_dependents(self, lease: Lease) -> None:
        """Queue the jobs that depend on this one, whoever submitted them."""
        try:
            job = RQJob.fetch(lease.job, connection=self._redis, serializer=JSONSerializer)
            queue = Queue(lease.queue, connection=self._redis, serializer=JSONSerializer)
            queue.enqueue_dependents(job)
        except Exception:  # RQ raises exceptions of any kind for a malformed job hash
            logger.exception("the jobs that depend on job %s could not be queued", lease.job)
