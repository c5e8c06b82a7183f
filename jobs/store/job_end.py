"""Ends jobs: KEYS and ARGV of `end_job`, the Lua function that every script which ends a job calls
behind its guard: a worker holds the job (settle.lua), it waits (rq_cancel.lua), or RQ's own tools
have ended it (record.lua)."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

from jobs import keys, lua
from jobs.api.conversation import Turn
from jobs.encoding import encodable
from jobs.errors import JobError
from jobs.results import outbox
from jobs.results.failures import Failure
from jobs.store.new_job import ROW_SECONDS
from jobs.store.rq_format import (
    DEPENDENTS_LUA,
    ROWS_LUA,
    End,
    format_time,
    job_key,
    queue_key,
    registry_key,
    result_fields,
    results_key,
)
from jobs.store.state import JobState
from jobs.store.turns import TURNS_LUA, session_of
from jobs.stream.entries import END_LUA, EndReason, end_id, end_payload, publishes

# Prelude, with those that it needs in front.
JOB_END_LUA = lua.load("jobs.store", "job_end", END_LUA, DEPENDENTS_LUA, TURNS_LUA, ROWS_LUA)

ROW_STATUSES: dict[End, outbox.Status] = {
    "finished": "ok",
    "failed": "error",
    "canceled": "cancelled",
}


# The tables of end_job, by name and in order.


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
    rows: str


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
    row_field: int
    row_seconds: int
    end_id: str
    end_payload: str
    has_log: int
    session: str
    turn: str
    replaces_turn: int


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
    row_index: int
    row: str  # outbox.encode(…)
    error: JobError | None = None
    completion: dict[str, Any] | None = None  # ChatCompletion's JSON
    failures: Sequence[Failure] = ()  # to be written to the hash; none leaves those there
    turn: Turn | None = None  # of the job's session
    replaces_turn: bool = False  # of the last turn
    worker: str = ""
    execution: str | None = None
    has_result: bool = False  # RQ has written its own
    ended_at: str = field(default_factory=format_time)

    @property
    def reason(self) -> EndReason:
        """What the token stream ends with."""
        if self.completion is not None:
            reason: EndReason = self.completion["choices"][0]["finish_reason"]
            return reason
        return "cancelled" if self.status == "canceled" else "error"

    @property
    def keys(self) -> EndKeys:
        return EndKeys(
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
            rows=keys.rows(self.run, self.row_index),
        )

    @property
    def args(self) -> list[Any]:
        """EndArgs and the fields of RQ's result."""
        usage = self.completion["usage"] if self.completion is not None else None
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
            row_field=self.row_index % keys.ROWS_PER_KEY,
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
            answer=self.completion,
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
        row_index=row["row_index"],
        row=outbox.encode(row),
        error=error,
        has_result=has_result,
        ended_at=format_time(datetime.fromtimestamp(now, UTC)),
    )
