"""Attempts at jobs in Redis: what a worker writes when it starts, streams, returns or ends a job.

The keys and formats are those of a real worker, from the same functions; the lease, with which
workers find the jobs of a dead one, is left out.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from redis import Redis

from jobs import keys
from jobs.api.answer import ChatCompletion
from jobs.api.conversation import Turn, ended_turn
from jobs.errors import JobError
from jobs.results import outbox
from jobs.results.failures import Failure, add_failure, failure, parse_failures
from jobs.store.job_end import ROW_STATUSES, JobEnd
from jobs.store.preludes import JOB_END_LUA, QUEUE_LUA
from jobs.store.rq_layout import (
    ATTEMPT,
    CANCEL,
    FAILURE_SECONDS,
    FAILURES,
    RESULT_SECONDS,
    End,
    decode_call,
    format_time,
    job_key,
    parse_time,
    queue_key,
    queue_names,
    request_of,
    scheduled_key,
)
from jobs.store.stream import StreamWriter
from jobs.store.turns import (
    BEGIN,
    History,
    begin_script,
    read_history,
    session_of,
)
from jobs.stream.delta import Delta
from jobs.stream.entries import Entry

WORKER = "fake-worker"
END = JOB_END_LUA + "\nend_job(KEYS, ARGV, function() end)"
PUSH = QUEUE_LUA + "\nqueue_job('RPUSH', KEYS[1], ARGV[1])"
TAKE = QUEUE_LUA + "\nremove_job(KEYS[1], ARGV[1]) redis.call('ZREM', KEYS[2], ARGV[1])"


@dataclass(frozen=True)
class Attempt:
    """One attempt at a job. Times are seconds since the epoch."""

    job: str
    queue: str
    number: int
    request: dict[str, Any]  # as submitted
    enqueued_at: float
    started_at: float
    keep: dict[End, int]  # seconds that the job is kept after its end
    history: History | None = None  # of its session

    @property
    def full_request(self) -> dict[str, Any]:
        """The request with all messages of its session."""
        if self.history is None:
            return self.request
        messages = [*self.history.messages, *self.request["messages"]]
        return {**self.request, "messages": messages}


class Attempts:
    """Starts, streams and ends jobs in one Redis."""

    def __init__(self, redis: Redis) -> None:
        self._redis: Any = redis
        self._writer = StreamWriter(redis)

    def waiting(self) -> list[str]:
        """The jobs in all queues, with the scheduled ones whose time has come: interactive ones
        first, then in the order of submission."""
        found = []
        for queue in queue_names(self._redis):
            jobs = self._redis.lrange(queue_key(queue), 0, -1)
            for tenant in self._redis.zrange(keys.tenants(queue), 0, -1):
                jobs += self._redis.lrange(keys.tenant_queue(queue, tenant.decode()), 0, -1)
            jobs += self._redis.zrangebyscore(scheduled_key(queue), "-inf", time.time())
            for job in jobs:
                enqueued_at = parse_time(self._redis.hget(job_key(job.decode()), "enqueued_at"))
                is_bulk = keys.is_bulk(queue)
                found.append((is_bulk, enqueued_at or 0.0, job.decode()))
        return [job for _, _, job in sorted(found, key=lambda entry: entry[:2])]

    def next_due(self) -> float:
        """Seconds until the next scheduled job is due; infinity if there is none."""
        firsts = (
            self._redis.zrange(scheduled_key(queue), 0, 0, withscores=True)
            for queue in queue_names(self._redis)
        )
        now = time.time()
        return min((max(0.0, due - now) for first in firsts for _, due in first), default=math.inf)

    def start(self, job: str) -> Attempt:
        """Take a job from its queue, or from the scheduled ones."""
        key, now = job_key(job), time.time()
        names = ("origin", "data", "enqueued_at", "result_ttl", "failure_ttl")
        origin, data, enqueued_at, result_ttl, failure_ttl = self._redis.hmget(key, names)
        pipeline = self._redis.pipeline()
        lists = (queue_key(origin.decode()), scheduled_key(origin.decode()))
        pipeline.eval(TAKE, len(lists), *lists, job)
        started = {"status": "started", "worker_name": WORKER, "started_at": format_time()}
        pipeline.hset(key, mapping=started)
        pipeline.hincrby(key, ATTEMPT, 1)
        *_, number = pipeline.execute()
        _, _, kwargs = decode_call(data)
        failed = int(failure_ttl or FAILURE_SECONDS)
        return Attempt(
            job=job,
            queue=origin.decode(),
            number=number,
            request=request_of(kwargs) or {},
            enqueued_at=parse_time(enqueued_at) or now,
            started_at=now,
            keep={
                "finished": int(result_ttl or RESULT_SECONDS),
                "failed": failed,
                "canceled": failed,
            },
        )

    def begin(self, attempt: Attempt) -> Attempt:
        """The attempt with the history of its session. Raises JobError if that refuses it."""
        if not session_of(attempt.request):
            return attempt
        names, args = begin_script(attempt.job, job_key(attempt.job), attempt.request)
        reply = self._redis.eval(BEGIN, len(names), *names, *args)
        return replace(attempt, history=read_history(attempt.job, attempt.request, reply))

    def write(self, attempt: Attempt, seq: int, deltas: Sequence[Delta]) -> bool:
        """Append an entry to the token stream. False if the stream belongs to a later attempt."""
        entry = Entry(attempt.job, attempt.number, seq, tuple(deltas))
        return self._writer.write_many([entry])[0]

    def is_cancelled(self, attempt: Attempt) -> bool:
        """True if a client has asked to stop the job."""
        return bool(self._redis.hget(job_key(attempt.job), CANCEL))

    def requeue(self, attempt: Attempt, error: JobError | None = None) -> None:
        """Return the job to the end of its queue; `error` is what the attempt ended with."""
        self._redis.eval(PUSH, 1, queue_key(attempt.queue), attempt.job)
        pipeline = self._redis.pipeline()
        if error is not None:
            pipeline.hset(
                job_key(attempt.job), FAILURES, json.dumps(self._failures(attempt, error))
            )
        pipeline.hdel(job_key(attempt.job), "worker_name", "started_at")
        pipeline.execute()

    def finish(self, attempt: Attempt, completion: ChatCompletion) -> None:
        """End the job with its answer."""
        answer = completion.to_dict()
        self._end(attempt, "finished", answer, None, self._turn(attempt, completion, None))

    def fail(
        self, attempt: Attempt, error: JobError, partial: ChatCompletion | None = None
    ) -> None:
        """End the job with an error; `partial` is what it had generated."""
        answer = partial.to_dict() if partial is not None else None
        end: End = "canceled" if error.code == "cancelled" else "failed"
        turn = self._turn(attempt, partial, error)
        self._end(attempt, end, answer, error, turn)

    def runs(self) -> list[str]:
        """The runs that have entries in their outbox, sorted."""
        return sorted(run.decode() for run in self._redis.smembers(keys.OUTBOXES))

    def take_entries(self, run: str) -> list[outbox.OutboxEntry]:
        """Remove all entries from the outbox of a run."""
        pipeline = self._redis.pipeline()
        pipeline.xrange(keys.outbox(run))
        pipeline.delete(keys.outbox(run))
        pipeline.srem(keys.OUTBOXES, run)
        found, *_ = pipeline.execute()
        return [outbox.decode(fields[outbox.FIELD.encode()]) for _, fields in found]

    def _end(
        self,
        attempt: Attempt,
        end: End,
        answer: dict[str, Any] | None,
        error: JobError | None,
        turn: Turn | None,
    ) -> None:
        failures = self._failures(attempt, error)
        row = self._row(attempt, ROW_STATUSES[end], answer, error, failures)
        job_end = JobEnd(
            job=attempt.job,
            queue=attempt.queue,
            status=end,
            attempt=attempt.number,
            keep=attempt.keep[end],
            request=attempt.request,
            run=row["run"],
            row_index=row["row_index"],
            row=outbox.encode(row),
            error=error,
            completion=answer if error is None else None,
            failures=failures if error is not None else (),
            turn=turn,
            replaces_turn=attempt.history is not None and attempt.history.replaces,
            worker=WORKER,
            execution=f"{WORKER}-{attempt.number}",
        )
        self._redis.eval(END, len(job_end.keys), *job_end.keys, *job_end.args)

    def _turn(
        self, attempt: Attempt, answer: ChatCompletion | None, error: JobError | None
    ) -> Turn | None:
        """The turn of the job's session; None if it has none."""
        if attempt.history is None or answer is None:
            return None
        if error is not None and error.code not in ("cancelled", "timeout"):
            return None
        messages = attempt.request["messages"]
        return ended_turn(messages, answer, cancelled=error is not None, job=attempt.job)

    def _failures(self, attempt: Attempt, error: JobError | None) -> list[Failure]:
        """The failed attempts at the job, with this one if it ended with an error."""
        before = parse_failures(self._redis.hget(job_key(attempt.job), FAILURES))
        if error is None or error.code == "cancelled":
            return before
        return add_failure(before, failure(attempt.number, time.time(), WORKER, error))

    def _row(
        self,
        attempt: Attempt,
        status: outbox.Status,
        answer: dict[str, Any] | None,
        error: JobError | None,
        failures: Sequence[Failure],
    ) -> outbox.OutboxEntry:
        return outbox.outbox_entry(
            attempt.job,
            attempt.request,
            status,
            attempt=attempt.number,
            completion=answer,
            error=error.to_dict() if error is not None else None,
            failures=failures,
            enqueued_at=attempt.enqueued_at,
            started_at=attempt.started_at,
            finished_at=time.time(),
            worker=WORKER,
        )
