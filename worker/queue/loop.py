"""The worker's loop: claims jobs while the batch has room, and settles each one when it has ended.

One process runs many jobs. This thread does all communication with Redis except the recorder's;
the backend generates on its own thread and passes its events to this one through a queue.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping

import redis

from jobs import clock, keys
from jobs.errors import JobError
from jobs.sizes import counted
from jobs.store.claimed_job import Lease
from jobs.store.control import Cancel, Control
from jobs.store.job_store import JobStore
from jobs.store.presence import Presence
from jobs.store.workers import Workers
from worker.backend import Backend
from worker.queue.admission import Admission
from worker.queue.attempts import Attempts
from worker.queue.capacity import Capacity
from worker.queue.circuit_breaker import CircuitBreaker
from worker.queue.lease_keeper import LeaseKeeper
from worker.queue.metrics import Metrics
from worker.queue.outage import Outage
from worker.queue.reaper import Reaper
from worker.queue.served import Served
from worker.queue.stages import Stages
from worker.queue.waker import Waker
from worker.queue.watchdog import Watchdog

logger = logging.getLogger(__name__)

LEASE_SECONDS = 12.0  # a worker that does not renew its lease for this long loses its jobs
CHECKS_PER_LEASE = 3
BURST_SECONDS = 0.1  # pause between polls of empty queues if the worker ends when all is done
IDLE_WAIT_SECONDS = 1.0  # longest wait for an event if no job runs; commands are read after it
BUSY_SECONDS = 0.005  # wait for the engine's next event while jobs run


class WorkerLoop:
    """`run` serves until the worker is stopped. Its collaborators are constructor arguments.

    grace: seconds that running jobs get after the first
    request to stop. burst: end when no job is queued, or started by any worker. on_idle: called
    when the last running job is settled. results: the state of the recorder, if there is one.
    """

    def __init__(
        self,
        backend: Backend,
        served: Served,
        store: JobStore,
        presence: Presence,
        workers: Workers,
        control: Control,
        attempts: Attempts,
        watchdog: Watchdog,
        keeper: LeaseKeeper,
        reaper: Reaper,
        breaker: CircuitBreaker,
        waker: Callable[[str, Callable[[], None]], Waker],
        stages: Stages,
        *,
        lease_seconds: float,
        grace: float,
        burst: bool,
        on_idle: Callable[[], None],
        results: Callable[[], Mapping[str, str] | None],
    ) -> None:
        self._backend, self._store, self._attempts = backend, store, attempts
        self._presence, self._workers, self._control = presence, workers, control
        self._watchdog, self._keeper, self._reaper = watchdog, keeper, reaper
        self._breaker, self._stages = breaker, stages
        self._admission, self._outage = Admission(presence, store, lease_seconds), Outage()
        self._check_seconds = lease_seconds / CHECKS_PER_LEASE
        self._served, self._metrics = served, Metrics(backend, served, results)
        self._grace, self._burst, self._on_idle = grace, burst, on_idle
        self.aborted = False  # asked twice to stop
        self.stop_at: float | None = None  # end of the grace period
        self._next_check = self._next_poll = 0.0  # monotonic, as all times here
        self._stop_logged = self._woken = self._drained = False  # drained: no job queued or started
        self._isolating = False  # claim nothing until the running jobs have ended
        self._waker = waker(keys.wake_worker(presence.name), self._wake)
        self._suspects: set[str] = set()  # queues whose quarantine had jobs at the last check

    def request_stop(self) -> None:
        """First call: claim no more jobs, give running ones the grace period. Second: end now."""
        self.aborted = self.stop_at is not None
        self.stop_at = time.monotonic() + (0.0 if self.aborted else self._grace)
        self._keeper.announce_stop()
        self._attempts.wake()

    def run(self) -> None:
        """Serve until stopped. If the engine dies, returns all jobs and raises JobError."""
        self._keeper.start()
        self._presence.birth()
        self._control.subscribe()
        run, crashed = self._stages.run, True
        try:
            while not self._finished():
                self._watchdog.touch()
                self._attempts.collect(self._collect_timeout())
                self._log_stop()
                try:
                    run("publishing", self._attempts.publish)
                    run("settling jobs", self._settle)
                    run("reading commands", self._handle_commands)
                    self._check()
                    self._enforce_deadlines()
                    run("looking for jobs", lambda: self._waker.look(self._store.any_waiting))
                    if not run("claiming jobs", self._claim):
                        self._next_poll = 0.0
                    if self._outage.lasts:
                        self._presence.may_pause()  # one command: the round may have sent none
                except redis.RedisError as error:
                    self._next_poll = 0.0  # the claim that failed is repeated
                    self._wait(self._outage.failed(error, len(self._attempts)))
                else:
                    self._outage.ended()
            crashed = False
        finally:
            self._shut_down(crashed)

    # --- stages of a round ------------------------------------------------------------------------

    def _log_stop(self) -> None:
        """Log the request to stop, once; not in `request_stop`, since signal handlers call it."""
        if self.stop_at is not None and not self._stop_logged:
            self._stop_logged = True
            logger.info(
                "stopping: no new jobs; jobs that are running: %d, with %g s to finish before they "
                "return to their queues (a second signal returns them now)",
                len(self._attempts),
                self._grace,
            )

    def _settle(self) -> None:
        if self._attempts.settle():
            self._next_poll = 0.0  # the batch has room again
            if not self._attempts:
                self._on_idle()

    def _handle_commands(self) -> None:
        for command in self._control.commands():
            if isinstance(command, Cancel):
                self._cancel(command.job)
            elif self.stop_at is None:
                self.request_stop()

    def _check(self) -> None:
        """Do the periodic checks, if they are due: report to Redis, drop the jobs that other
        workers have taken over, return those of dead workers, and decide whether jobs may be
        claimed."""
        now = time.monotonic()
        if now < self._next_check:
            return
        sick, pause = self._breaker.reason, self._admission.pause
        metrics = self._metrics.read(now, sick, pause, claims=self.stop_at is None)
        jobs, run = [attempt.lease.job for attempt in self._attempts], self._stages.run
        run("reporting", lambda: self._presence.report(metrics, jobs))
        run("checking leases", self._check_leases)
        run("looking for dead workers", lambda: self._reaper.reap(set(self._attempts.leases)))
        run("checking for pauses", self._admission.update)
        run("looking for suspects", self._make_room_for_suspects)
        self._next_check = now + self._check_seconds

    def _enforce_deadlines(self) -> None:
        for attempt in self._attempts:
            if attempt.deadline is not None and clock.now() >= attempt.deadline:
                attempt.stop(attempt.overdue)

    def _claim(self) -> None:
        """Claim jobs while the batch has room. A job takes as much room as it has choices, so some
        of the claimed jobs may not fit: they go back before their attempt has started."""
        now = time.monotonic()
        waits = now < self._next_poll and not self._woken
        if self.stop_at is not None or self._admission.pause or waits:
            return
        idle = not self._attempts.any_unsettled
        if idle:
            self._breaker.settled()
        if (self._isolating and not idle) or not self._breaker.may_claim():
            return
        capacity = Capacity(self._backend, self._served.model_names, single=self._breaker.half_open)
        self._waker.pass_on(capacity.wake_keys)
        if not capacity.any:
            return
        self._woken = False  # before the claim: it may be set while that runs
        found, held_seconds = self._store.claim(capacity.of, suspects=idle)
        claimed = [job for job in found if not job.belongs_to_others]
        others = [job for job in found if job.belongs_to_others]
        self._isolating = any(job.suspect for job in claimed)
        surplus: list[Lease] = []
        epoch = self._breaker.epoch
        if claimed:
            self._breaker.claimed()
        for job in claimed:
            name, bulk = self._store.model_of(job.lease)
            may_start = self.stop_at is None and self._breaker.epoch == epoch
            if may_start and capacity.of(name, bulk):
                capacity.use(name, bulk, self._attempts.start(job))
                self._watchdog.touch()  # starting many jobs may take minutes
            else:
                surplus.append(job.lease)
        if surplus:
            self._store.leases.give_back(surplus, undo_attempt=True)
        if others:
            self._store.leases.hand_on(others)
        if claimed or others:
            self._drained, self._next_poll = False, 0.0
        else:
            # A job that another worker has started comes back if that worker dies.
            none_left = capacity.everywhere and held_seconds == math.inf
            self._drained = self._burst and none_left and not self._store.any_unsettled()
            pause = min(held_seconds, BURST_SECONDS if self._burst else math.inf)
            self._next_poll = now + pause
            self._waker.arm(capacity.wake_keys)

    # --- helpers ----------------------------------------------------------------------------------

    def _finished(self) -> bool:
        if self.stop_at is not None and time.monotonic() >= self.stop_at:
            return True
        stops = self.stop_at is not None or self._drained
        return stops and not self._attempts.any_unsettled

    def _collect_timeout(self) -> float:
        if self._attempts.any_unsettled:
            return BUSY_SECONDS
        due = self._next_check
        if not self._admission.pause and self._breaker.may_claim():
            due = min(due, self._next_poll)
        return min(max(BUSY_SECONDS, due - time.monotonic()), IDLE_WAIT_SECONDS)

    def _make_room_for_suspects(self) -> None:
        """Suspects are taken by idle workers. If a busy one sees them wait at two checks, no worker
        is idle: then one per queue claims nothing until it is idle itself."""
        if not self._attempts:
            return
        waiting = self._store.suspects()
        for queue in self._suspects & waiting:
            if self._workers.elect_isolated(queue, CHECKS_PER_LEASE * self._check_seconds):
                self._isolating = True
        self._suspects = waiting

    def _wake(self) -> None:
        """Note that a job may wait. Called by the waker's thread, which sets nothing else here."""
        self._woken = True
        self._attempts.wake()

    def _cancel(self, job: str) -> None:
        attempt = self._attempts.get(job)
        if attempt is not None:
            attempt.stop(JobError("cancelled", f"job {job} was cancelled"))

    def _check_leases(self) -> None:
        attempts = list(self._attempts)
        checked = self._store.leases.check([attempt.lease for attempt in attempts])
        for attempt, (held, cancelled) in zip(attempts, checked, strict=True):
            if not held:
                logger.warning("lost the lease of job %s: dropping it", attempt.lease.job)
                self._attempts.drop(attempt)
                self._store.leases.forget([attempt.lease])
            elif cancelled:
                self._cancel(attempt.lease.job)

    def _wait(self, seconds: float) -> None:
        """Keep everything and pause: each stage is repeated after an error, without loss."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and not self.aborted:
            self._attempts.take(left)

    def _shut_down(self, crashed: bool) -> None:
        """Return the jobs that have not ended and sign off. A crash counts against its jobs."""
        self._log_stop()  # if the last round took longer than the grace period
        unfinished = len(self._attempts)
        for attempt in self._attempts:
            attempt.stop(JobError("cancelled", "the worker stops"))
        self._waker.close()  # the jobs that return wake other workers
        try:
            self._stages.run("settling jobs", self._attempts.settle)
            leases = self._attempts.leases
            if crashed:
                self._reaper.reclaim_own(leases)
            elif leases:
                self._store.leases.give_back(leases)
            if leases:
                logger.info("returned to the queues: %s", counted(len(leases), "unfinished job"))
            self._keeper.stop()
            self._workers.leave()
            self._presence.death()
            self._waker.pass_on(())
        except redis.RedisError as error:
            logger.warning(
                "Redis fails (%s): other workers get %s when this worker's lease expires",
                error,
                counted(unfinished, "job"),
            )
        finally:
            self._keeper.stop()
            self._workers.close()
            self._control.close()
