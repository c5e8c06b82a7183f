"""The running attempts of this process: from the engine's events to their settlement in Redis.

loop.py starts attempts and calls this class from its one thread. The engine's thread announces its
events through a queue; their assemblies make deltas and outcomes of them here.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import redis
from redis.sentinel import MasterNotFoundError

from jobs import keys
from jobs.errors import JobError, failure_of
from jobs.sizes import size_text
from jobs.store.claimed_job import ClaimedJob, Lease
from jobs.store.connection.transport import Demoted
from jobs.store.damage import Busy, Damaged, Unwritable
from jobs.store.job_store import JobStore
from jobs.store.settlement import Settlement
from worker.backend import Assembly, Backend, MachineError, Outcome, TooLong
from worker.queue.attempt import Attempt, SettlementBuilder, make_attempt
from worker.queue.attempt_sink import AttemptSink, Event, Pending, Woken
from worker.queue.circuit_breaker import CircuitBreaker
from worker.queue.job_figures import JobFigures
from worker.queue.job_spans import JobSpans
from worker.queue.publisher import Publisher
from worker.queue.retry import retry_of

logger = logging.getLogger(__name__)

# How long events are collected for one round of publishing and settling: per running job, and at
# most. A round takes the GIL from the engine's thread, so many jobs share one.
COLLECT_SECONDS_PER_JOB, MAX_COLLECT_SECONDS = 0.004, 0.05
MAX_TEXT = 1000  # characters of an error in the log: it may quote the request


def _log_failure(settlement: Settlement, error: JobError, model: str) -> None:
    """Log the failure of a job that has ended. It is a warning if another worker might run it, or
    if its form is at fault, so that its producer may not read the result."""
    job, text = settlement.lease.job, " ".join(error.message.split())
    odd = error.retryable or settlement.claimed.fault is not None
    about: dict[str, object] = {"job": job, "run": settlement.run, "model": model}
    about |= {"code": error.code, "attempt": settlement.lease.attempt}
    level = logging.WARNING if odd else logging.INFO
    logger.log(level, "job %s failed: %s: %s", job, error.code, text[:MAX_TEXT], extra=about)


def _reason(error: redis.RedisError, size: int) -> str:
    """The reason for which a job with an answer fails: Redis does not take its row of `size`
    bytes."""
    if isinstance(error, Damaged) and error.found:
        return f"the answer can't be kept: {error.found[0]}"
    return f"Redis did not take the answer ({size_text(size)}): {error}"


def _named(error: TooLong, longest: int) -> JobError:
    """The error of a job that is too long for all workers, with the longest context of those."""
    fact = f"the longest context of its workers is {longest} tokens"
    return JobError(error.code, f"{error.message}; {fact}", error.param)


class Attempts:
    """All running attempts, by job id in the order of their claims. `models`: the own name of each
    model, by the names that requests may use."""

    def __init__(
        self,
        backend: Backend,
        models: Mapping[str, str],
        store: JobStore,
        publisher: Publisher,
        settlements: SettlementBuilder,
        breaker: CircuitBreaker,
        figures: JobFigures,
        spans: JobSpans | None = None,
    ) -> None:
        self._breaker, self._figures, self._spans = breaker, figures, spans
        self._backend, self._models = backend, models
        self._store, self._publisher, self._settlements = store, publisher, settlements
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._running: dict[str, Attempt] = {}
        # When an attempt of each model began or ended last (monotonic), by its own name.
        self.used_at: dict[str, float] = {}
        self._ended: list[Attempt] = []  # of those, with an outcome
        self._refused: list[Settlement] = []  # of jobs that were not started
        self._failed = False  # the last settlement was not taken

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[Attempt]:
        return iter(list(self._running.values()))

    def get(self, job: str) -> Attempt | None:
        return self._running.get(job)

    @property
    def any_unsettled(self) -> bool:
        return bool(self._running or self._refused)

    @property
    def running(self) -> Counter[str]:
        """Number of attempts by the own names of their models."""
        return Counter(map(self._own_name, self))

    @property
    def leases(self) -> list[Lease]:
        """The leases of all jobs of this worker that are not settled."""
        refused = [settlement.lease for settlement in self._refused]
        return [attempt.lease for attempt in self] + refused

    def start(self, claimed: ClaimedJob) -> int:
        """Start or refuse a claimed job. Returns the number of sequences it adds to the batch."""
        stale = self._running.get(claimed.lease.job)
        if stale is not None:  # this process was suspended, and the job came back to it
            self.drop(stale)
        try:
            attempt = make_attempt(claimed, self._models)
        except JobError as error:
            self.refuse(claimed, error)
            return 0
        except BaseException as error:  # a bad job must not end the worker
            self.refuse(claimed, failure_of(error))
            return 0
        self._running[claimed.lease.job] = attempt
        self.used_at[self._own_name(attempt)] = time.monotonic()
        attempt.breaker_epoch = self._breaker.epoch
        return self._submit(attempt, hands_on=True)

    def _submit(self, attempt: Attempt, *, hands_on: bool) -> int:
        """Pass an attempt to the backend. Returns the number of sequences it adds to the batch."""
        try:
            sink = AttemptSink(attempt, self._events, hands_on=hands_on)
            attempt.handle = self._backend.submit(attempt.operation, attempt.request, sink)
            return attempt.sequences
        except OSError as error:
            self._end(attempt, Outcome(error=MachineError.of(error)))
        except BaseException as error:  # a bad job must not end the worker
            reason = failure_of(error)
            if reason is not error:
                logger.exception("job %s could not be started", attempt.lease.job)
            self._end(attempt, Outcome(error=reason))
        return 0

    def drop(self, attempt: Attempt) -> None:
        """Stop and forget an attempt whose lease is lost."""
        attempt.stop(JobError("cancelled", "the lease was lost"))
        self._figures.lost_leases += 1
        self._forget(attempt)

    def wake(self) -> None:
        """End a `collect` early. May be called from a signal handler."""
        self._events.put(Woken())

    def collect(self, timeout: float) -> None:
        """Take the engine's events; wait up to `timeout` seconds for the first one. Events that
        follow shortly after are taken in the same round."""
        if self.take(timeout):
            time.sleep(min(COLLECT_SECONDS_PER_JOB * len(self), MAX_COLLECT_SECONDS))
            for _ in range(self._events.qsize()):  # more may come all the time
                self.take(0.0)

    def take(self, timeout: float) -> bool:
        """Take one event. False if none came within `timeout` seconds."""
        try:
            event = self._events.get(timeout=timeout)
        except queue.Empty:
            return False
        if not isinstance(event, Woken) and self._is_running(event.attempt):
            if isinstance(event, Pending):
                self._advance(event.attempt, event.assembly)
            else:
                self._end(event.attempt, event.outcome)
        return True

    def publish(self) -> None:
        """Send the deltas that are due to the token streams."""
        self._publisher.flush(attempt.stream for attempt in self)

    def settle(self) -> bool:
        """Settle the jobs that have ended; False if there are none. After a Redis error the next
        call settles the same jobs one by one, and fails the one that Redis does not take."""
        if not self._ended and not self._refused:
            return False
        self._publisher.flush((attempt.stream for attempt in self._ended), everything=True)
        self._leave_to_longer()
        for attempt in list(self._ended):
            if self._requeue(attempt):
                self._forget(attempt)
        settlements = [self._settlement(attempt) for attempt in self._ended] + self._refused
        outcomes = [attempt.outcome for attempt in self._ended] + [None] * len(self._refused)
        held = self._settle_one_by_one(settlements) if self._failed else self._send(settlements)
        kept: dict[Lease, redis.RedisError] = {}
        for settlement, outcome, was_held in zip(settlements, outcomes, held, strict=True):
            if isinstance(was_held, redis.RedisError):
                kept[settlement.lease] = was_held
            elif was_held:
                model = self._model_of(settlement.lease)
                self._figures.ended(model, settlement, outcome)
                if self._spans is not None:
                    self._spans.ended(model, settlement, outcome)
                if settlement.status == "failed" and settlement.error is not None:
                    _log_failure(settlement, settlement.error, model)
            else:
                self._figures.lost_leases += 1
                about = {"job": settlement.lease.job, "run": settlement.run}
                text = "job %s was settled before, or taken over"
                logger.warning(text, settlement.lease.job, extra=about)
        self._refused = [one for one in self._refused if one.lease in kept]
        self._breaker.settled()
        for attempt in list(self._ended):
            if attempt.lease not in kept:
                self._forget(attempt)
        for error in kept.values():
            self._failed = True  # they are settled one by one again
            raise error
        return True

    def _send(self, settlements: Sequence[Settlement]) -> Sequence[bool | redis.RedisError]:
        self._failed = True  # until Redis has taken them
        held = self._store.settle_each(settlements)
        self._failed = False
        return held

    def _settle_one_by_one(
        self, settlements: list[Settlement]
    ) -> Sequence[bool | redis.RedisError]:
        """Settle each on its own. One that Redis does not take is too large: its job fails, and its
        place in `settlements` is taken by the one with the error. The error takes the place of one
        that can't fail either: another program has written its keys. Raises redis.RedisError if
        Redis does not reply, or takes no writes."""
        held: list[bool | redis.RedisError] = []
        for index, settlement in enumerate(settlements):
            was_held = self._settle_alone(settlement)
            if isinstance(was_held, redis.RedisError):
                reason = JobError("internal", _reason(was_held, len(settlement.row)))
                failed = self._settlements.for_error(settlement.claimed, reason)
                try:
                    (was_held,) = self._store.settle([failed])
                except Damaged as second:
                    was_held = second
                else:
                    settlements[index] = failed
            held.append(was_held)
        self._failed = False
        return held

    def _settle_alone(self, settlement: Settlement) -> bool | redis.RedisError:
        """Whether the lease was held; the error of a settlement that Redis refuses, or that ends
        the connection twice while Redis replies to others. Raises redis.RedisError if any
        settlement would fail: Redis does not reply, takes no writes, is blocked, or fails over."""
        for is_last in (False, True):
            try:
                (held,) = self._store.settle([settlement])
                return held
            except (Unwritable, Busy, Demoted, MasterNotFoundError):
                raise
            except (redis.ConnectionError, redis.TimeoutError) as error:
                self._store.ping()  # Redis may have come back in this moment
                if is_last:
                    return error
            except redis.RedisError as error:
                self._store.ping()
                return error
        raise AssertionError

    def _settlement(self, attempt: Attempt) -> Settlement:
        try:
            return self._settlements.for_attempt(attempt, attempt.claimed.row_bytes)
        except BaseException as error:  # an outcome that has no row fails only its own job
            reason = failure_of(error)
            logger.exception("the outcome of job %s could not be encoded", attempt.lease.job)
            return self._settlements.for_error(attempt.claimed, reason)

    def _leave_to_longer(self) -> None:
        """Return the jobs that are too long for this worker for workers with a longer context, or
        for one that may have it. Without one, a job fails, and its error names the longest context
        there is."""
        found = [one for one in self._ended if isinstance(one.error, TooLong) and not one.generated]
        if not found:
            return
        workers = self._store.workers()  # one read for all jobs of a round
        silent = workers.silent_ones(self._settlements.worker)
        for attempt in found:
            error, model = attempt.error, keys.model_of(attempt.lease.queue)
            assert isinstance(error, TooLong)
            contexts = workers.contexts(model, attempt.operation.func)
            own = contexts.pop(self._settlements.worker, 0)
            able = [name for name, tokens in contexts.items() if tokens >= error.tokens] or silent
            if able:
                self._store.leases.leave_to(attempt.lease, able[0], error.tokens)
                self._forget(attempt)
                about = {"job": attempt.lease.job, "model": model}
                text = "job %s needs a context of %d tokens: left to worker %s"
                logger.info(text, attempt.lease.job, error.tokens, able[0], extra=about)
            elif error.rest:
                self._run_rest(attempt)
            elif (longest := max(contexts.values(), default=0)) > own:
                attempt.outcome = Outcome(error=_named(error, longest))

    def _run_rest(self, attempt: Attempt) -> None:
        """Run what this worker can of a job of which a part is too long for all workers."""
        self._ended.remove(attempt)
        attempt.outcome = None
        self._submit(attempt, hands_on=False)
        if attempt.stop_reason is not None and attempt.handle is not None:
            attempt.handle.cancel()

    def _requeue(self, attempt: Attempt) -> bool:
        """Return a job to its queue if it is to be retried. False if it ends."""
        retry, claimed, error = retry_of(attempt), attempt.claimed, attempt.error
        if retry is None or error is None:
            return False
        leases, pause = self._store.leases, retry.pause
        failures = self._settlements.failures(claimed, error)
        if retry.allowed is None:
            requeued = leases.return_after_machine_error(attempt.lease, pause, failures)
        else:
            front = claimed.limits.front
            requeued = leases.retry(attempt.lease, retry.allowed, pause, failures, front=front)
        if requeued:
            job, model = attempt.lease.job, self._model_of(attempt.lease)
            self._figures.retried(model, error)
            about = {"job": job, "model": model, "code": error.code}
            logger.info("retrying job %s in %.1f s after %s", job, pause, error, extra=about)
        return requeued

    def _advance(self, attempt: Attempt, assembly: Assembly) -> None:
        """Take the deltas that an attempt has added, and its outcome."""
        deltas, outcome = assembly.take()
        if deltas:
            if not attempt.generated:
                attempt.generated = True
                self._breaker.generates(attempt.breaker_epoch)
            if attempt.request.publishes:
                attempt.stream.add(deltas)
        if outcome is None:
            return
        if outcome.error is not None and attempt.handle is not None and not attempt.stop_reason:
            attempt.handle.cancel()  # the rest is of no use
        self._end(attempt, outcome)

    def _end(self, attempt: Attempt, outcome: Outcome) -> None:
        attempt.outcome = outcome
        self._breaker.ended(
            attempt.lease.job, outcome, attempt.breaker_epoch, generated=attempt.generated
        )
        self._ended.append(attempt)

    def refuse(self, claimed: ClaimedJob, error: JobError) -> None:
        """Fail a claimed job, which is not started."""
        self._refused.append(self._settlements.for_error(claimed, error))

    def _model_of(self, lease: Lease) -> str:
        """The own name of the model of a job's queue, which is served or was so."""
        name, _ = self._store.model_of(lease)
        return self._models.get(name, name)

    def _is_running(self, attempt: Attempt) -> bool:
        return self._running.get(attempt.lease.job) is attempt

    def _forget(self, attempt: Attempt) -> None:
        if attempt in self._ended:
            self._ended.remove(attempt)
        if self._is_running(attempt):
            del self._running[attempt.lease.job]
            self.used_at[self._own_name(attempt)] = time.monotonic()

    def _own_name(self, attempt: Attempt) -> str:
        """The own name of the model of an attempt."""
        return self._models.get(attempt.request.model, attempt.request.model)
