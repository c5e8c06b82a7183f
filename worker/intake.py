"""The RQ side of the worker: takes jobs while the batch has room, and sees each one to its end.

One process runs many jobs. This thread does all the talking with Redis: it claims, publishes,
settles, heeds cancellations and time limits, keeps the worker's lease, and returns the jobs of
workers that died. Generation happens in the backend's own thread; a queue leads from there to here.
"""

from __future__ import annotations

import json
import logging
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import redis
from rq.suspension import is_suspended
from rq.worker import BaseWorker
from rq.worker.base import WorkerStatus

from jobs import keys, outbox
from jobs.stream import StreamWriter
from jobs.types import ChatRequest, JobError, invalid
from worker.backend import Backend, Flight, ModelInfo, Outcome, Piece
from worker.ledger import Claimed, Lease, Ledger, Settlement
from worker.publisher import Outgoing, Publisher

logger = logging.getLogger(__name__)

LEASE_SECONDS = 12.0  # a worker that is silent for this long has lost its jobs
HANG_SECONDS = 120.0  # an engine that is busy and makes no step for this long counts as dead
IDLE_SECONDS = 0.02  # how often an idle worker looks into its queues
BUSY_SECONDS = 0.005  # how long a busy one waits for the engine before it looks around
BACKLOG_ROWS = 20_000  # rows waiting for Parquet at which no more jobs are taken
RETRY_SECONDS = (0.1, 5.0)  # pauses while Redis is away: the first, the longest


@dataclass
class Execution:
    """One attempt at one job, from claim to settlement."""

    claimed: Claimed
    request: ChatRequest
    stream: Outgoing
    deadline: float | None  # seconds since the epoch
    flight: Flight | None = None
    reason: JobError | None = None  # why we stopped it, if we did
    outcome: Outcome | None = None

    @property
    def lease(self) -> Lease:
        return self.claimed.lease

    def stop(self, reason: JobError) -> None:
        """End early; the first reason counts."""
        self.reason = self.reason or reason
        if self.flight is not None:
            self.flight.cancel()


Event = tuple[Execution, Sequence[Piece] | Outcome]


class _Sink:
    """Hands a flight's events over to this thread."""

    def __init__(self, execution: Execution, events: queue.SimpleQueue[Event]) -> None:
        self._execution, self._events = execution, events

    def pieces(self, pieces: Sequence[Piece]) -> None:
        self._events.put((self._execution, pieces))

    def ended(self, outcome: Outcome) -> None:
        self._events.put((self._execution, outcome))


class Intake(BaseWorker):
    """RQ's view of us: a worker of the models' queues. `run` is its whole life."""

    def __init__(
        self,
        backend: Backend,
        client: redis.Redis,
        models: Sequence[ModelInfo],
        *,
        name: str,
        backlog: Callable[[], int],
        grace: float,
        burst: bool,
        lease_seconds: float = LEASE_SECONDS,
    ) -> None:
        self._models = {model.name: model for model in models}
        names = list(self._models)
        queues = [keys.chat_queue(m) for m in names] + [keys.bulk_queue(m) for m in names]
        super().__init__(queues, name=name, connection=client, serializer="json")
        self._backend, self._backlog = backend, backlog
        self._grace, self._burst, self._lease_seconds = grace, burst, lease_seconds
        self._ledger = Ledger(client, self.name, self.key)
        self._publisher = Publisher(StreamWriter(client))
        self._control = client.pubsub(ignore_subscribe_messages=True)  # type: ignore[no-untyped-call]
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.executions: dict[str, Execution] = {}  # by job id, in the order of their claims
        self._ended: list[Execution] = []
        self._refused: list[Settlement] = []  # jobs that could not even start
        self._stop_at: float | None = None  # monotonic time at which grace ends
        self._next_beat = self._next_reap = 0.0
        self._progress = (-1, time.monotonic())  # the engine's counter, and when it moved
        self._tokens = (0, time.monotonic(), 0.0)  # counted, when, per second
        self._paused = False  # suspended by RQ, or too many rows wait for Parquet
        self._drained = False
        self._started_at = time.time()

    # --- life -------------------------------------------------------------------------------------

    def request_stop(self, signum: int | None = None, frame: Any = None) -> None:
        """The first time: no new jobs, running ones get their grace. The second: at once."""
        again = self._stop_at is not None
        self._stop_at = time.monotonic() + (0.0 if again else self._grace)

    def run(self) -> None:
        """Serve until stopped. Raises JobError if the engine dies, after giving all jobs back."""
        self.register_birth()  # type: ignore[no-untyped-call]
        self._control.subscribe(keys.CONTROL, self.pubsub_channel_name)
        pause = RETRY_SECONDS[0]
        away = False
        try:
            while not self._over():
                try:
                    self._tick()
                except redis.ConnectionError as error:  # includes time-outs of connecting
                    self._log_away(away, error)
                    away = True
                    time.sleep(pause)
                    pause = min(2 * pause, RETRY_SECONDS[1])
                except redis.TimeoutError as error:
                    self._log_away(away, error)
                    away = True
                else:
                    if away:
                        logger.info("Redis is back")
                    away, pause = False, RETRY_SECONDS[0]
        finally:
            self._leave()

    def _log_away(self, known: bool, error: redis.RedisError) -> None:
        if not known:
            logger.warning("Redis is away (%s): keeping %d jobs", error, len(self.executions))

    def _over(self) -> bool:
        if self._ended or self._refused:
            return False
        if self._stop_at is not None and time.monotonic() >= self._stop_at:
            return True
        idle = not self.executions
        return idle and (self._stop_at is not None or (self._burst and self._drained))

    def _tick(self) -> None:
        self._listen()
        self._publisher.flush(execution.stream for execution in self.executions.values())
        self._settle()
        self._heed_control()
        now = time.monotonic()
        if now >= self._next_beat:
            self._beat(now)
            self._next_beat = now + self._lease_seconds / 4
        if now >= self._next_reap:
            self._reap()
            self._next_reap = now + self._lease_seconds / 3
        self._heed_deadlines()
        if self._stop_at is None and not self._paused:
            self._claim()

    def _leave(self) -> None:
        """Give back what still runs, and say goodbye."""
        for execution in self.executions.values():
            execution.stop(JobError("cancelled", "the worker stops"))
        leases = [execution.lease for execution in self.executions.values()]
        self.executions.clear()
        if leases:
            self._ledger.give_back(leases)
            logger.info("gave %d unfinished jobs back to their queues", len(leases))
        self._control.close()
        self.connection.delete(keys.worker(self.name))
        self.register_death()  # type: ignore[no-untyped-call]

    # --- from the engine --------------------------------------------------------------------------

    def _listen(self) -> None:
        """Take what the engine has said; wait a little if it has said nothing."""
        wait = BUSY_SECONDS if self.executions else IDLE_SECONDS
        try:
            event = self._events.get(timeout=wait)
            while True:
                self._take(*event)
                event = self._events.get_nowait()
        except queue.Empty:
            return

    def _take(self, execution: Execution, said: Sequence[Piece] | Outcome) -> None:
        if self.executions.get(execution.lease.job) is not execution:
            return  # given back or lost meanwhile
        if isinstance(said, Outcome):
            execution.outcome = said
            self._ended.append(execution)
        elif execution.request.publishes:
            execution.stream.add(said)

    def _settle(self) -> None:
        """End the jobs that have an outcome. Called again with the same ones if Redis fails."""
        if not self._ended and not self._refused:
            return
        self._publisher.flush((one.stream for one in self._ended), everything=True)
        for execution in list(self._ended):
            if self._retried(execution):
                self._forget(execution)
        settlements = [self._settlement(execution) for execution in self._ended]
        held = self._ledger.settle(settlements + self._refused)
        for settlement, there in zip(settlements + self._refused, held, strict=True):
            if not there:
                logger.warning("job %s was taken over; its row is not ours", settlement.lease.job)
        self._refused = []
        for execution in list(self._ended):
            self._forget(execution)

    def _forget(self, execution: Execution) -> None:
        self._ended.remove(execution)
        self.executions.pop(execution.lease.job, None)

    def _retried(self, execution: Execution) -> bool:
        """Whether an error sends the job back to its queue."""
        error = self._error(execution)
        allowed = execution.request.job.retries
        if error is None or not error.retryable or execution.claimed.retried >= allowed:
            return False
        again = self._ledger.retry(execution.lease, allowed)
        if again:
            logger.info("job %s runs again after %s", execution.lease.job, error)
        return again

    @staticmethod
    def _error(execution: Execution) -> JobError | None:
        outcome = execution.outcome
        assert outcome is not None
        if outcome.error is None:
            return None
        if outcome.error.code == "cancelled" and execution.reason is not None:
            return execution.reason
        return outcome.error

    def _settlement(self, execution: Execution) -> Settlement:
        outcome, error = execution.outcome, self._error(execution)
        assert outcome is not None
        answer = outcome.completion or outcome.partial
        sampling = outcome.sampling
        entry = self._entry(
            execution.claimed,
            execution.request.to_dict(),
            error,
            completion=answer.to_dict() if answer else None,
            prompt_token_ids=outcome.prompt_token_ids,
            output_token_ids=outcome.output_token_ids,
            token_logprobs=outcome.token_logprobs,
            sampling=sampling.to_dict() if sampling else None,
            seed=outcome.seed,
            started_at=outcome.started_at,
            first_token_at=outcome.first_token_at,
            finished_at=outcome.finished_at,
            provenance=asdict(self._models[execution.request.model]),
        )
        return _settlement(execution.claimed, entry, outcome, error)

    # --- from the queues --------------------------------------------------------------------------

    def _claim(self) -> None:
        """Take jobs while there is room: those that somebody waits for before bulk ones."""
        took = False
        for prefix in (keys.chat_queue, keys.bulk_queue):
            for model in self._models:
                room = self._backend.room(model)
                for claimed in self._ledger.claim(prefix(model), room) if room else ():
                    took = True
                    self._start(claimed)
        self._drained = not took

    def _start(self, claimed: Claimed) -> None:
        try:
            execution = self._execution(claimed)
            self.executions[claimed.lease.job] = execution
            sink = _Sink(execution, self._events)
            execution.flight = self._backend.submit(execution.request, sink)
        except JobError as error:
            self._refuse(claimed, error)
        except Exception as error:  # a bad job must not take the worker with it
            logger.exception("job %s could not be started", claimed.lease.job)
            self._refuse(claimed, JobError("internal", f"{type(error).__name__}: {error}"))

    def _execution(self, claimed: Claimed) -> Execution:
        """The job, checked: producers may be in any language. Raises JobError."""
        if claimed.fault is not None:
            raise claimed.fault
        if claimed.func != keys.TASK:
            raise invalid(
                f"this queue runs {keys.TASK} alone, the job wants {claimed.func!r}", "func"
            )
        if claimed.args or set(claimed.kwargs) != {"request"}:
            raise invalid(f"{keys.TASK} takes one keyword argument, request", "request")
        if claimed.cancelled:
            raise JobError("cancelled", f"job {claimed.lease.job} was cancelled")
        request = ChatRequest.parse(claimed.kwargs["request"])
        request.job.id = claimed.lease.job
        if request.model not in self._models:
            served = ", ".join(sorted(self._models))
            raise JobError(
                "model_not_found",
                f"this queue's worker doesn't serve model '{request.model}'; it serves: {served}",
                "model",
            )
        ttl = request.job.ttl
        deadline = None if ttl is None else claimed.enqueued_at + ttl
        if deadline is not None and time.time() >= deadline:
            raise JobError("timeout", f"waited longer than its ttl of {ttl:g} s", "job.ttl")
        stream = Outgoing(claimed.lease.job, claimed.lease.attempt)
        return Execution(claimed, request, stream, deadline)

    def _refuse(self, claimed: Claimed, error: JobError) -> None:
        """End a job that can't run."""
        self.executions.pop(claimed.lease.job, None)
        request = claimed.kwargs.get("request")
        entry = self._entry(claimed, request if isinstance(request, dict) else {}, error)
        self._refused.append(_settlement(claimed, entry, Outcome(error=error), error))

    def _entry(
        self,
        claimed: Claimed,
        request: dict[str, Any],
        error: JobError | None,
        finished_at: float | None = None,
        **known: Any,
    ) -> outbox.OutboxEntry:
        cancelled = error is not None and error.code == "cancelled"
        return outbox.outbox_entry(
            claimed.lease.job,
            request,
            "ok" if error is None else "cancelled" if cancelled else "error",
            attempt=claimed.lease.attempt,
            error=error.to_dict() if error else None,
            enqueued_at=claimed.enqueued_at,
            finished_at=finished_at or time.time(),
            worker=self.name,
            host=self.hostname,
            **known,
        )

    # --- limits, cancellation, leases -------------------------------------------------------------

    def _heed_deadlines(self) -> None:
        now = time.time()
        for execution in self.executions.values():
            if execution.deadline is not None and now >= execution.deadline:
                ttl = execution.request.job.ttl
                execution.stop(
                    JobError("timeout", f"not done within its ttl of {ttl} s", "job.ttl")
                )

    def _heed_control(self) -> None:
        """Messages to all workers (cancel), and RQ's to this one (stop-job, shutdown)."""
        while (message := self._control.get_message()) is not None:
            try:
                said = json.loads(message["data"])
                job = said.get("job") or said.get("job_id")
                verb = said.get("op") or said.get("command")
            except (ValueError, AttributeError, TypeError):
                continue
            if verb in ("cancel", "stop-job") and job in self.executions:
                self.executions[job].stop(JobError("cancelled", f"job {job} was cancelled"))
            elif verb == "shutdown" and self._stop_at is None:
                self.request_stop()

    def _beat(self, now: float) -> None:
        """Renew the lease, unless the engine hangs; find out which jobs are no longer ours."""
        health = self._backend.health()
        if not health.alive:
            raise JobError("internal", f"the engine thread died: {health.error}")
        idle = not health.running and not health.waiting
        if idle or health.progress != self._progress[0]:
            self._progress = (health.progress, now)
        hangs = now - self._progress[1] > HANG_SECONDS
        if hangs:
            logger.error("the engine has made no step for %.0f s", now - self._progress[1])
        else:
            self._renew(now)
        executions = list(self.executions.values())
        checked = self._ledger.check([execution.lease for execution in executions])
        for execution, (held, cancelled) in zip(executions, checked, strict=True):
            if not held:
                logger.warning("lost the lease of job %s: dropping it", execution.lease.job)
                execution.stop(JobError("cancelled", "the lease was lost"))
                del self.executions[execution.lease.job]
            elif cancelled:
                execution.stop(JobError("cancelled", f"job {execution.lease.job} was cancelled"))
        self._ended = [one for one in self._ended if one.lease.job in self.executions]
        waiting = self._backlog()
        self._paused = hangs or waiting > BACKLOG_ROWS or bool(is_suspended(self.connection, self))
        if waiting > BACKLOG_ROWS:
            logger.warning("%d rows wait for Parquet: taking no more jobs", waiting)

    def _renew(self, now: float) -> None:
        health, memory = self._backend.health(), self._backend.memory()
        tokens, since, speed = self._tokens
        if now > since:
            speed = (health.tokens_generated - tokens) / (now - since)
        self._tokens = (health.tokens_generated, now, speed)
        said: Mapping[str, Any] = {
            "name": self.name,
            "host": self.hostname,
            "pid": self.pid,
            "started_at": self._started_at,
            "models": list(self._models),
            "device": memory.device,
            "memory": asdict(memory),
            "running": health.running,
            "waiting": health.waiting,
            "jobs": len(self.executions),
            "tokens": health.tokens_generated,
            "tokens_per_second": round(speed, 1),
        }
        state = WorkerStatus.BUSY if self.executions else WorkerStatus.IDLE
        pipeline = self.connection.pipeline(transaction=False)
        pipeline.set(keys.worker(self.name), json.dumps(said), px=int(self._lease_seconds * 1000))
        self.heartbeat(int(5 * self._lease_seconds) + 1, pipeline=pipeline)
        self.set_state(state, pipeline=pipeline)
        self.set_current_job_id(next(iter(self.executions), None), pipeline=pipeline)
        pipeline.execute()

    def _reap(self) -> None:
        """Return the jobs of workers that died, and claims of ours whose answer never came."""
        for name in self.queue_names():
            for lease, worker in self._ledger.started(name):
                if worker == self.name:
                    ours = self.executions.get(lease.job)
                    waiting = any(one.lease == lease for one in self._refused)
                    if (ours is None or ours.lease != lease) and not waiting:
                        self._ledger.give_back([lease])
                elif not self.connection.exists(keys.worker(worker or "")):
                    self._reclaim(lease, worker or "")

    def _reclaim(self, lease: Lease, dead: str) -> None:
        if self._ledger.reclaim(lease, dead):
            logger.warning("job %s goes back to its queue: worker %s is gone", lease.job, dead)
            return
        claimed = self._ledger.read(lease)
        error = JobError(
            "worker_lost",
            f"job {lease.job} was with {lease.attempt} workers and the last three died: it is not "
            "tried again; look at their logs, and at what is special about this request",
        )
        request = claimed.kwargs.get("request")
        entry = self._entry(claimed, request if isinstance(request, dict) else {}, error)
        settlement = _settlement(claimed, entry, Outcome(error=error), error)
        self._ledger.settle([settlement], absent=dead)

    def clean_registries(self) -> None:
        """RQ's own clean-up would fail or repeat jobs that are well; ours is `_reap`."""


def _settlement(
    claimed: Claimed, entry: outbox.OutboxEntry, outcome: Outcome, error: JobError | None
) -> Settlement:
    return Settlement(
        lease=claimed.lease,
        entry=entry,
        completion=outcome.completion if error is None else None,
        error=error,
        result_ttl=claimed.result_ttl,
        failure_ttl=claimed.failure_ttl,
    )
