"""Ends jobs in RQ's keys: the arguments of settle.lua, made from a `Settlement`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redis import Redis
from redis.client import Pipeline

from jobs import clock
from jobs.api.conversation import Turn
from jobs.errors import JobError
from jobs.results.failures import Failure
from jobs.store import rq_format, rq_scripts
from jobs.store.job_end import JobEnd
from jobs.store.rq_job import ClaimedJob, Lease
from jobs.store.rq_scripts import SettleArgs, SettleKeys, lease_args, lease_keys
from jobs.store.rq_workers import DeadWorker

SECONDS_WHEN_FULL = 60  # how long results are kept at most while Redis is full: rows have them too
MEMORY_CHECK_SECONDS = 1.0  # how long the answer to "is Redis full" holds
WORKER_COUNTERS = {"finished": "successful_job_count", "failed": "failed_job_count"}


@dataclass(frozen=True, slots=True)
class Settlement:
    """The end of a job: the values for RQ's keys, the outbox and the token stream."""

    claimed: ClaimedJob
    run: str
    row_index: int
    row: str  # outbox.encode(…)
    completion: dict[str, Any] | None  # ChatCompletion's JSON
    error: JobError | None
    failures: Sequence[Failure]
    turn: Turn | None = None  # of the job's session

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


class Settler:
    """Settles jobs in the name of one worker."""

    def __init__(self, redis: Redis, worker: str, worker_key: str) -> None:
        self._redis: Any = redis  # its stubs leave open whether replies are bytes
        self._worker, self._worker_key = worker, worker_key
        self._settle = redis.register_script(rq_scripts.SETTLE)
        self._full, self._full_until = False, 0.0  # the last answer, and until when it holds

    def send(self, settlement: Settlement, dead: DeadWorker | None, pipeline: Pipeline) -> None:
        """Add the script to `pipeline`. It replies 0 if the lease is lost, else 1. `dead`: the
        worker that died with the job; nothing is changed if it turns out to be alive."""
        claimed, completion, error = settlement.claimed, settlement.completion, settlement.error
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
            row_index=settlement.row_index,
            row=settlement.row,
            error=error,
            completion=completion,
            failures=settlement.failures if error is not None else (),
            turn=settlement.turn,
            replaces_turn=claimed.history is not None and claimed.history.replaces,
            worker=self._worker,
            execution=lease.execution,
        )
        self._settle(keys=[*script_keys, *end.keys], args=[*args, *end.args], client=pipeline)

    def _is_full(self) -> bool:
        """True if Redis has used up its maxmemory."""
        if time.monotonic() >= self._full_until:
            memory = self._redis.info("memory")
            self._full = 0 < memory.get("maxmemory", 0) <= memory["used_memory"]
            self._full_until = time.monotonic() + MEMORY_CHECK_SECONDS
        return self._full
