"""The attempts under way in this process: from the engine's events to their settlement in Redis.

Owns the attempts. loop.py puts claimed jobs in and calls from its one thread; only the
queue of events is shared with the engine's.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Iterator, Mapping, Sequence

from jobs.errors import JobError
from jobs.stream.delta import Delta
from worker.backend import Backend, ModelInfo, Outcome
from worker.queue.attempt import Attempt, Reporter, admit
from worker.queue.publisher import Publisher
from worker.queue.rq_job import ClaimedJob, Lease
from worker.queue.rq_store import RQStore, Settlement

logger = logging.getLogger(__name__)

# How long events are gathered for one round of talking with Redis: for each job, and at most.
# A round costs the interpreter, which the engine's thread needs too; many jobs share one.
GATHER_SECONDS = (0.004, 0.05)

Event = tuple[Attempt, Outcome | None]  # None: there is something to publish


class _Sink:
    """Hands a flight's events over to the intake's thread; never blocks."""

    def __init__(self, execution: Attempt, events: queue.SimpleQueue[Event | None]) -> None:
        self._execution, self._events = execution, events

    def deltas(self, pieces: Sequence[Delta]) -> None:
        if self._execution.request.publishes and self._execution.stream.add(pieces):
            self._events.put((self._execution, None))

    def ended(self, outcome: Outcome) -> None:
        self._events.put((self._execution, outcome))


class Attempts:
    """All executions, by job id in the order of their claims."""

    def __init__(
        self,
        backend: Backend,
        models: Mapping[str, ModelInfo],
        ledger: RQStore,
        publisher: Publisher,
        report: Reporter,
    ) -> None:
        self._backend, self._models = backend, models
        self._ledger, self._publisher, self._report = ledger, publisher, report
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._executions: dict[str, Attempt] = {}
        self._ended: list[Attempt] = []
        self._refused: list[Settlement] = []  # jobs that could not even start

    def __len__(self) -> int:
        return len(self._executions)

    def __iter__(self) -> Iterator[Attempt]:
        return iter(list(self._executions.values()))

    def get(self, job: str) -> Attempt | None:
        return self._executions.get(job)

    @property
    def leases(self) -> list[Lease]:
        """The leases of all jobs that are ours, to the last step of their ends."""
        refused = [settlement.lease for settlement in self._refused]
        return [execution.lease for execution in self] + refused

    def begin(self, claimed: ClaimedJob) -> int:
        """Begin with a job, or refuse it. Answers how many sequences it puts into the batch."""
        stale = self._executions.get(claimed.lease.job)
        if stale is not None:  # we were frozen so long that it came back to us
            self.drop(stale, JobError("cancelled", "the lease was lost"))
        try:
            execution = admit(claimed, self._models)
            self._executions[claimed.lease.job] = execution
            sink = _Sink(execution, self._events)
            execution.flight = self._backend.submit(execution.request, sink)
            return execution.sequences
        except JobError as error:
            self._refuse(claimed, error)
        except Exception as error:  # a bad job must not take the worker with it
            logger.exception("job %s could not be started", claimed.lease.job)
            self._refuse(claimed, JobError("internal", f"{type(error).__name__}: {error}"))
        return 0

    def drop(self, execution: Attempt, reason: JobError) -> None:
        """Stop a job that is no longer ours and forget it."""
        execution.stop(reason)
        self._forget(execution)

    def wake(self) -> None:
        """End a `listen`; may be called from a signal handler."""
        self._events.put(None)

    def listen(self, wait: float) -> None:
        """Take what the engine has said; wait up to `wait` seconds if it has said nothing.
        What is said shortly after goes along.
        """
        if self.take(wait):
            each, most = GATHER_SECONDS
            time.sleep(min(each * len(self), most))
            while self.take(0.0):
                pass

    def take(self, wait: float) -> bool:
        """Take one event. False if none came in time."""
        try:
            event = self._events.get(timeout=wait)
        except queue.Empty:
            return False
        if event is None:
            return True
        execution, said = event
        if self._executions.get(execution.lease.job) is not execution:
            return True  # given back or lost meanwhile
        if said is not None:
            execution.outcome = said
            self._ended.append(execution)
        return True

    def publish(self) -> None:
        """Send the pieces that are due."""
        self._publisher.flush(execution.stream for execution in self)

    def settle(self) -> bool:
        """End the jobs that have an outcome, and say whether there were any. Called again with the
        same ones if Redis fails."""
        if not self._ended and not self._refused:
            return False
        self._publisher.flush((one.stream for one in self._ended), everything=True)
        for execution in list(self._ended):
            if self._retried(execution):
                self._forget(execution)
        settlements = [self._settlement(one) for one in self._ended] + self._refused
        held = self._ledger.settle(settlements)
        for settlement, there in zip(settlements, held, strict=True):
            if not there:
                logger.warning("job %s was settled before, or taken over", settlement.lease.job)
        self._refused = []
        for execution in list(self._ended):
            self._forget(execution)
        return True

    def _settlement(self, execution: Attempt) -> Settlement:
        try:
            return self._report.ended(execution)
        except Exception as error:  # an answer that can't be written down fails its job alone
            logger.exception("the answer of job %s can't be kept", execution.lease.job)
            reason = JobError("internal", f"{type(error).__name__}: {error}")
            return self._report.refused(execution.claimed, reason)

    def _retried(self, execution: Attempt) -> bool:
        """Whether an error sends the job back to its queue."""
        error, allowed = execution.error, execution.request.job.retries
        if error is None or not error.retryable or execution.claimed.retried >= allowed:
            return False
        again = self._ledger.retry(execution.lease, allowed)
        if again:
            logger.info("job %s runs again after %s", execution.lease.job, error)
        return again

    def _refuse(self, claimed: ClaimedJob, error: JobError) -> None:
        self._executions.pop(claimed.lease.job, None)
        self._refused.append(self._report.refused(claimed, error))

    def _forget(self, execution: Attempt) -> None:
        if execution in self._ended:
            self._ended.remove(execution)
        if self._executions.get(execution.lease.job) is execution:
            del self._executions[execution.lease.job]
