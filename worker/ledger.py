"""RQ's books, as far as we write them: claiming, settling and returning jobs.

All contact with RQ's keys is here and in `worker.lua`; `worker.intake` decides when. Written
against RQ 2.12; the contract tests hold it against RQ's own readers.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
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

from jobs import keys, outbox
from jobs.state import ATTEMPT, CANCEL
from jobs.stream import end_id, end_payload
from jobs.submit import FAILURE_SECONDS, RESULT_SECONDS
from jobs.types import ChatCompletion, JobError, invalid
from worker import lua

logger = logging.getLogger(__name__)

WIP_SECONDS = 10 * 365 * 86_400  # RQ's own clean-up must never think that a lease has expired
MAX_LOST = 3  # workers that may die with a job before it is failed
MAX_RESULTS = 10  # results that RQ keeps of one job
MAX_DATA = 256 * 2**20  # bytes of a job's data, unpacked


@dataclass(frozen=True, slots=True)
class Lease:
    """One attempt at a job: the entry in RQ's books that makes it ours."""

    job: str
    queue: str
    execution: str
    attempt: int

    @property
    def member(self) -> str:
        return f"{self.job}:{self.execution}"


@dataclass(frozen=True, slots=True)
class Claimed:
    """A job that was taken from its queue, as its hash has it. `enqueued_at`: epoch seconds."""

    lease: Lease
    func: str | None
    args: Sequence[Any]
    kwargs: dict[str, Any]
    fault: JobError | None  # why its data can't be read
    enqueued_at: float
    result_ttl: int
    failure_ttl: int
    retried: int
    cancelled: bool


@dataclass(frozen=True, slots=True)
class Settlement:
    """How a job ends: what goes into RQ's books, the outbox and the stream."""

    lease: Lease
    entry: outbox.OutboxEntry
    completion: ChatCompletion | None
    error: JobError | None
    result_ttl: int
    failure_ttl: int


class Ledger:
    """The books of one Redis, written in the name of one worker."""

    def __init__(self, redis: Redis, worker: str, worker_key: str) -> None:
        self._redis: Any = redis  # its stubs know neither pipelines' nor bytes' ways
        self._worker, self._worker_key = worker, worker_key
        self._claim = redis.register_script(lua.CLAIM)
        self._settle = redis.register_script(lua.SETTLE)
        self._return = redis.register_script(lua.RETURN)

    def claim(self, queue: str, count: int) -> list[Claimed]:
        """Take up to `count` jobs from the front of a queue."""
        moment = time.time()
        flat = self._claim(
            keys=[_queue_key(queue), _wip_key(queue)],
            args=[
                count,
                self._worker,
                uuid.uuid4().hex,
                utcformat(now()),
                moment,
                int(moment) + WIP_SECONDS,
            ],
        )
        leases = [
            Lease(job.decode(), queue, execution.decode(), int(attempt))
            for job, attempt, execution in zip(flat[::3], flat[1::3], flat[2::3], strict=True)
        ]
        pipeline = self._redis.pipeline(transaction=False)
        for lease in leases:
            pipeline.hgetall(RQJob.key_for(lease.job))
        hashes = pipeline.execute() if leases else []
        return [_read(lease, fields, moment) for lease, fields in zip(leases, hashes, strict=True)]

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

    def give_back(self, leases: Sequence[Lease]) -> None:
        """Put jobs back to the front of their queues, in their order, no retry spent."""
        pipeline = self._redis.pipeline(transaction=False)
        for lease in reversed(leases):
            self._return_one(lease, "LPUSH", client=pipeline)
        pipeline.execute()

    def retry(self, lease: Lease, allowed: int) -> bool:
        """Queue a job again after an error, at the back. False if its retries are used up."""
        answer = self._return_one(lease, "RPUSH", counter=lua.RETRIED, limit=allowed + 1)
        return int(answer) != 2

    def reclaim(self, lease: Lease, dead: str) -> bool:
        """Return the job of a worker that died. False if it was one worker too many."""
        answer = self._return_one(lease, "LPUSH", counter=lua.LOST, limit=MAX_LOST, absent=dead)
        return int(answer) != 2

    def started(self, queue: str) -> list[tuple[Lease, str | None]]:
        """All jobs of a queue that some worker has, with the worker's name."""
        members = [member.decode() for member in self._redis.zrange(_wip_key(queue), 0, -1)]
        split = [member.rpartition(":") for member in members]
        pipeline = self._redis.pipeline(transaction=False)
        for job, _, execution in split:
            pipeline.hget(_execution_key(job, execution), "worker_name")
            pipeline.hget(RQJob.key_for(job), ATTEMPT)
        found = iter(pipeline.execute() if split else [])
        leases = []
        for job, _, execution in split:
            worker, attempt = next(found), next(found)
            lease = Lease(job, queue, execution, int(attempt or 0))
            leases.append((lease, worker.decode() if worker else None))
        return leases

    def read(self, lease: Lease) -> Claimed:
        """The job of a lease, as its hash has it now."""
        fields: dict[Any, Any] = self._redis.hgetall(RQJob.key_for(lease.job))
        return _read(lease, fields, time.time())

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

    def _settle_one(self, settlement: Settlement, absent: str | None, client: Pipeline) -> None:
        lease, entry, error = settlement.lease, settlement.entry, settlement.error
        moment = now()
        registry: type[BaseRegistry]
        if settlement.completion is not None:
            status, kind, registry = "finished", Result.Type.SUCCESSFUL, FinishedJobRegistry
        elif error is not None and error.code == "cancelled":
            status, kind, registry = "canceled", Result.Type.STOPPED, CanceledJobRegistry
        else:
            status, kind, registry = "failed", Result.Type.FAILED, FailedJobRegistry
        keep = settlement.result_ttl if status == "finished" else settlement.failure_ttl
        answer = settlement.completion
        result = Result(
            lease.job,
            kind,
            connection=None,  # type: ignore[arg-type]
            return_value=answer.to_dict() if answer is not None else None,
            exc_string=str(error) if error is not None else None,
            worker_name=self._worker,
            serializer=JSONSerializer,
            execution_id=lease.execution,
        )
        usage = answer.usage if answer is not None else None
        reason = answer.choices[0].finish_reason if answer is not None else None
        ended = "cancelled" if status == "canceled" else "error"
        self._settle(
            keys=[
                RQJob.key_for(lease.job),
                _wip_key(lease.queue),
                _execution_key(lease.job, lease.execution),
                f"rq:executions:{lease.job}",
                registry.key_template.format(lease.queue),
                keys.results(lease.job),
                keys.outbox(entry["run"]),
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
                outbox.encode(entry),
                entry["run"],
                end_id(lease.attempt),
                end_payload(reason or ended, usage, error),  # type: ignore[arg-type]
                "successful_job_count" if status == "finished" else "failed_job_count",
                MAX_RESULTS,
                absent or "",
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


def _read(lease: Lease, fields: dict[bytes, bytes], moment: float) -> Claimed:
    """A job's hash, read so that nothing in it can raise, and nothing is unpickled or imported."""
    func: str | None = None
    args: Sequence[Any] = []
    kwargs: dict[str, Any] = {}
    fault = None
    try:
        func, args, kwargs = decode_call(fields.get(b"data", b""))
    except ValueError as error:
        fault = invalid(
            f"the job's data is not what RQ's JSON serializer writes ({error}): enqueue "
            f"{keys.TASK} with the keyword argument request, serializer json"
        )
    enqueued = _moment(fields.get(b"enqueued_at")) or _moment(fields.get(b"created_at"))
    return Claimed(
        lease=lease,
        func=func,
        args=args,
        kwargs=kwargs,
        fault=fault,
        enqueued_at=enqueued or moment,
        result_ttl=_integer(fields.get(b"result_ttl"), RESULT_SECONDS),
        failure_ttl=_integer(fields.get(b"failure_ttl"), FAILURE_SECONDS),
        retried=_integer(fields.get(lua.RETRIED.encode()), 0),
        cancelled=bool(fields.get(CANCEL.encode())),
    )


def decode_call(data: bytes) -> tuple[str | None, Sequence[Any], dict[str, Any]]:
    """Function name, args and kwargs of a job's data, JSON only. Raises ValueError."""
    unpack = zlib.decompressobj()
    try:
        text = unpack.decompress(data, MAX_DATA)
        if unpack.unconsumed_tail:
            raise ValueError(f"it is larger than {MAX_DATA} bytes")
    except zlib.error:
        text = data  # RQ takes both
    call = json.loads(text.decode())
    if not isinstance(call, list) or len(call) != 4:
        raise ValueError("it is not a list of four")
    func, instance, args, kwargs = call
    if instance is not None or not isinstance(args, list) or not isinstance(kwargs, dict):
        raise ValueError("it is not a call of a plain function")
    return func if isinstance(func, str) else None, args, kwargs


def _queue_key(queue: str) -> str:
    return Queue.redis_queue_namespace_prefix + queue


def _wip_key(queue: str) -> str:
    return StartedJobRegistry.key_template.format(queue)


def _execution_key(job: str, execution: str) -> str:
    return f"rq:execution:{job}:{execution}"


def _moment(value: bytes | None) -> float | None:
    """RQ's time format → seconds since the epoch."""
    try:
        moment = datetime.fromisoformat((value or b"").decode())
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _integer(value: bytes | None, default: int) -> int:
    try:
        return default if value is None else int(value)
    except ValueError:
        return default
