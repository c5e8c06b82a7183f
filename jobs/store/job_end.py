"""Ends jobs: the only ways in which a job ends, its row is written and its stream closed.

`end_job`, the Lua function of job_end.lua, does what follows from an end. Each script calls it
behind a guard: a worker holds the job (settle.lua), the job waits (cancel.lua), or RQ's own tools
have ended it (record.lua).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

from redis import Redis, RedisError
from redis.client import Pipeline

from jobs import clock, keys, lua
from jobs.api.conversation import Turn
from jobs.api.row_keys import named_rows
from jobs.encoding import encodable
from jobs.errors import JobError
from jobs.operations import operation_named
from jobs.results import outbox
from jobs.results.failures import Failure
from jobs.store.connection.protocol import Steps, command, retry
from jobs.store.expiry import ROW_SECONDS, SECONDS_WHEN_FULL
from jobs.store.job_state import JobState, read_existing
from jobs.store.leases import lease_args, lease_keys
from jobs.store.preludes import JOB_END_LUA, LEASE_LUA, TENANT_RUNNING_LUA
from jobs.store.reservations import ReservedRows, reserved_rows
from jobs.store.rq_layout import (
    End,
    deferred_key,
    format_time,
    job_key,
    queue_key,
    registry_key,
    result_fields,
    results_key,
    scheduled_key,
)
from jobs.store.settlement import Answer, Settlement
from jobs.store.turns import session_of
from jobs.store.workers import DeadWorker
from jobs.stream.entries import EndReason, end_id, end_payload, publishes

SETTLE = lua.load("jobs.store", "settle", JOB_END_LUA, TENANT_RUNNING_LUA, LEASE_LUA)
CANCEL = lua.load("jobs.store", "cancel", JOB_END_LUA)
RECORD = lua.load("jobs.store", "record", JOB_END_LUA)

MEMORY_CHECK_SECONDS = 1.0  # how long the answer to "is Redis full" holds
WORKER_COUNTERS = {"finished": "successful_job_count", "failed": "failed_job_count"}
ROW_STATUSES: dict[End, outbox.Status] = {
    "finished": "ok",
    "failed": "error",
    "canceled": "cancelled",
}


# The tables of job_end.lua, and KEYS and ARGV of its callers, by name and in order.


class EndKeys(NamedTuple):
    job: str
    queue: str
    registry: str
    results: str
    outbox: str
    outboxes: str
    log: str
    live: str
    open_bytes: str
    deadlines: str


class EndArgs(NamedTuple):
    job_id: str
    status: str
    attempt: int
    ended_at: str
    now: int
    keep: int
    error: str
    failures: str
    row: str
    run: str
    fields: str
    row_seconds: int
    end_id: str
    end_payload: str
    has_log: int
    session: str
    turn: str
    replaces_turn: int


class SettleKeys(NamedTuple):
    wip: str
    execution: str
    executions: str
    started: str
    workers: str
    worker: str


class SettleArgs(NamedTuple):
    job_id: str
    execution_id: str
    entry: str
    dead: str
    seen_lease: int
    counter: str
    working_time: float


class CancelKeys(NamedTuple):
    quarantine: str
    scheduled: str
    deferred: str


class CancelArgs(NamedTuple):
    read_attempt: bytes
    read_failures: bytes
    control_channel: str
    control_message: str


class RecordArgs(NamedTuple):
    read_attempt: bytes
    read_failures: bytes


@dataclass(frozen=True, slots=True)
class JobEnd:
    """The end of a job, for its hash, RQ's registry and result, its row, its token stream and its
    session."""

    job: str
    queue: str
    status: End
    attempt: int  # whose row this is
    keep: int  # seconds to keep the job; 0 deletes it, -1 keeps it for ever
    request: Mapping[str, Any]  # as submitted; {} if it can't be read
    run: str
    rows: ReservedRows
    row: str  # outbox.encode(…)
    error: JobError | None = None
    answer: Answer | None = None  # of a job that has finished
    failures: Sequence[Failure] = ()  # to be written to the hash; none leaves those there
    turn: Turn | None = None  # of the job's session
    replaces_turn: bool = False  # of the last turn
    worker: str = ""
    execution: str | None = None
    has_result: bool = False  # RQ has written its own
    ended_at: str = field(default_factory=format_time)

    @property
    def reason(self) -> EndReason:
        """The reason at the end of the token stream."""
        if self.answer is not None:
            return self.answer.finish_reason
        return "cancelled" if self.status == "canceled" else "error"

    @property
    def keys(self) -> list[str]:
        """EndKeys and the hashes of the rows."""
        named = EndKeys(
            job=job_key(self.job),
            queue=queue_key(self.queue),
            registry=registry_key(self.queue, self.status),
            results=results_key(self.job),
            outbox=keys.outbox(self.run),
            outboxes=keys.OUTBOXES,
            log=keys.log(self.job),
            live=keys.live(self.job),
            open_bytes=keys.OPEN_BYTES,
            deadlines=keys.DEADLINES,
        )
        return [*named, *self.rows.hashes]

    @property
    def args(self) -> list[Any]:
        """EndArgs and the fields of RQ's result."""
        usage = self.answer.usage if self.answer is not None else None
        args = EndArgs(
            job_id=self.job,
            status=self.status,
            attempt=self.attempt,
            ended_at=self.ended_at,
            now=int(time.time()),
            keep=self.keep,
            error=json.dumps(self.error.to_dict()) if self.error is not None else "",
            failures=json.dumps(self.failures) if self.failures else "",
            row=self.row,
            run=self.run,
            fields=self.rows.fields,
            row_seconds=ROW_SECONDS,
            end_id=end_id(self.attempt),
            end_payload=end_payload(self.reason, usage, self.error),
            has_log=int(publishes(self.request)),
            session=session_of(self.request),
            turn=self.turn.to_json() if self.turn is not None else "",
            replaces_turn=int(self.replaces_turn),
        )
        if self.has_result:
            return list(args)
        result = result_fields(
            self.job,
            self.status,
            answer=self.answer.text if self.answer is not None else None,
            peak_memory_mb=self.answer.peak_memory_mb if self.answer is not None else None,
            error=encodable(str(self.error)) if self.error is not None else None,
            worker=self.worker,
            execution=self.execution,
        )
        return [*args, *result]


def unanswered(
    state: JobState,
    error: JobError,
    end: End,
    attempt: int,
    *,
    has_result: bool = False,
    ended_at: float | None = None,
) -> JobEnd:
    """The end of a job that no worker runs. `ended_at`: when it ended; None for now."""
    now = time.time() if ended_at is None else ended_at
    row = outbox.outbox_entry(
        state.id,
        state.request,
        ROW_STATUSES[end],
        operation=operation_named(state.func).name,
        attempt=attempt,
        error=error.to_dict(),
        failures=state.failures,
        enqueued_at=state.enqueued_at,
        finished_at=now,
    )
    return JobEnd(
        job=state.id,
        queue=state.queue,
        status=end,
        attempt=attempt,
        keep=state.failure_ttl,
        request=state.request,
        run=row["run"],
        rows=_rows_of(row["run"], state.request),
        row=outbox.encode(row),
        error=error,
        has_result=has_result,
        ended_at=format_time(datetime.fromtimestamp(now, UTC)),
    )


def _rows_of(run: str, request: Mapping[str, Any]) -> ReservedRows:
    return reserved_rows(run, named_rows(request).values())


class Settler:
    """Settles jobs in the name of one worker."""

    def __init__(self, redis: Redis, worker: str, worker_key: str) -> None:
        self._redis: Any = redis  # its stubs leave open whether replies are bytes
        self._worker, self._worker_key = worker, worker_key
        self._settle = redis.register_script(SETTLE)
        self._full, self._full_until = False, 0.0  # the last answer, and until when it holds

    def settle(self, settlements: Sequence[Settlement], dead: DeadWorker | None) -> list[bool]:
        """End jobs in one round trip; False for each whose lease is lost. `dead`: the worker that
        died with them; nothing is changed if it turns out to be alive."""
        held: list[bool] = []
        for reply in self.settle_each(settlements, dead):
            if isinstance(reply, RedisError):
                raise reply
            held.append(reply)
        return held

    def settle_each(
        self, settlements: Sequence[Settlement], dead: DeadWorker | None = None
    ) -> list[bool | RedisError]:
        """`settle`, with the error in the place of each that Redis has refused: the others have
        ended. Raises RedisError if the connection fails."""
        pipeline = self._redis.pipeline(transaction=False)
        for settlement in settlements:
            self.send(settlement, dead, pipeline)
        replies = pipeline.execute(raise_on_error=False)
        return [reply if isinstance(reply, RedisError) else bool(reply) for reply in replies]

    def send(self, settlement: Settlement, dead: DeadWorker | None, pipeline: Pipeline) -> None:
        """Add the script to `pipeline`. It replies 0 if the lease is lost, else 1."""
        claimed, error = settlement.claimed, settlement.error
        lease, status = claimed.lease, settlement.status
        keep = claimed.result_ttl if status == "finished" else claimed.failure_ttl
        if status == "finished" and keep > SECONDS_WHEN_FULL and self._is_full():
            keep = SECONDS_WHEN_FULL
        holder = self._worker if dead is None else dead.name
        script_keys = SettleKeys(*lease_keys(lease, holder), worker=self._worker_key)
        args = SettleArgs(
            *lease_args(lease, dead),
            counter=WORKER_COUNTERS.get(status, ""),
            working_time=clock.now() - claimed.claimed_at,
        )
        end = JobEnd(
            job=lease.job,
            queue=lease.queue,
            status=status,
            attempt=lease.attempt,
            keep=keep,
            request=claimed.request,
            run=settlement.run,
            rows=_rows_of(settlement.run, claimed.request),
            row=settlement.row,
            error=error,
            answer=settlement.answer,
            failures=settlement.failures if error is not None else (),
            turn=settlement.turn,
            replaces_turn=claimed.history is not None and claimed.history.replaces,
            worker=self._worker,
            execution=lease.execution,
            ended_at=format_time(datetime.fromtimestamp(clock.now() + claimed.redis_ahead, UTC)),
        )
        self._settle(keys=[*script_keys, *end.keys], args=[*args, *end.args], client=pipeline)

    def _is_full(self) -> bool:
        """True if Redis has used up its maxmemory."""
        if time.monotonic() >= self._full_until:
            memory = self._redis.info("memory")
            self._full = 0 < memory.get("maxmemory", 0) <= memory["used_memory"]
            self._full_until = time.monotonic() + MEMORY_CHECK_SECONDS
        return self._full


def cancel(job_id: str) -> Steps[bool]:
    """Cancel the job. False if it had ended already."""
    while True:
        state = yield from read_existing(job_id)
        if state.status.over:
            return False
        error = JobError("cancelled", f"job {job_id} was cancelled before it was run")
        message = json.dumps({"op": "cancel", "job": job_id})
        reply = yield from end_waiting(state, error, "canceled", message)
        if reply != b"again":
            return reply != b"over"


def end_waiting(state: JobState, error: JobError, end: End, message: str = "") -> Steps[bytes]:
    """The reply of cancel.lua; `again` if the job has changed since `state` was read. `message`:
    for the worker of a job that does not wait but runs."""
    # A job that was requeued has a row of its last attempt: this end is the next one.
    attempt = state.attempt + (state.row_attempt == state.attempt)
    job_end = unanswered(state, error, end, attempt)
    script_keys = CancelKeys(
        quarantine=keys.quarantine(state.queue),
        scheduled=scheduled_key(state.queue),
        deferred=deferred_key(state.queue),
    )
    script_args = CancelArgs(state.attempt_text, state.failures_text, keys.CONTROL, message)
    all_keys = (*script_keys, *job_end.keys)
    call = command("eval", CANCEL, len(all_keys), *all_keys, *script_args, *job_end.args)
    reply: bytes = yield from retry(call)
    return reply


def record_end(state: JobState, error: JobError, end: End, ended_at: float | None) -> Steps[bool]:
    """Write the row of a job that RQ's own tools have ended. False if the job has changed since
    `state` was read, or has a row of this attempt."""
    job_end = unanswered(state, error, end, state.attempt, has_result=True, ended_at=ended_at)
    args = (*RecordArgs(state.attempt_text, state.failures_text), *job_end.args)
    reply = yield from retry(command("eval", RECORD, len(job_end.keys), *job_end.keys, *args))
    return bool(reply)
