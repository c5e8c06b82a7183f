"""The worker's loop: claims jobs, publishes what they generate, and settles each when it has ended.

One process runs many jobs. This thread does all communication with Redis except the recorder's;
the backend generates on its own thread and passes its events to this one through a queue.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

import redis

from jobs import clock
from jobs.errors import JobError
from jobs.sizes import counted
from jobs.store.connection.connect import may_pass
from jobs.store.control import Cancel, Control
from jobs.store.job_store import JobStore
from jobs.store.operator import OperatorCommand
from worker.queue.attempts import Attempts
from worker.queue.claimer import Claimer
from worker.queue.membership import Membership
from worker.queue.operator_commands import OperatorCommands
from worker.queue.outage import Outage
from worker.queue.reaper import Reaper
from worker.queue.stages import Stages
from worker.queue.status_collector import StatusCollector
from worker.queue.watchdog import Watchdog

logger = logging.getLogger(__name__)

LEASE_SECONDS = 12.0  # a worker that does not renew its lease for this long loses its jobs
CHECKS_PER_LEASE = 3
IDLE_WAIT_SECONDS = 1.0  # longest wait for an event if no job runs; commands are read after it
COMMAND_SECONDS = 0.1  # the same while a command of an operator runs
BUSY_SECONDS = 0.005  # wait for the engine's next event while jobs run


class Residency(Protocol):
    """Brings models into memory. See worker.residency.manager."""

    def step(self) -> None:
        """Called in each round. Raises redis.RedisError."""

    def stop(self) -> None:
        """Bring no more models in. May be called from any thread."""


class WorkerLoop:
    """`run` serves until the worker is stopped. Its collaborators are constructor arguments.

    grace: seconds that running jobs get after the first request to stop. on_idle: called when the
    last running job is settled. residency: which models are in memory; None: always the same.
    """

    def __init__(
        self,
        store: JobStore,
        attempts: Attempts,
        claimer: Claimer,
        membership: Membership,
        reaper: Reaper,
        control: Control,
        operator: OperatorCommands,
        status: StatusCollector,
        watchdog: Watchdog,
        stages: Stages,
        *,
        lease_seconds: float,
        grace: float,
        on_idle: Callable[[], None],
        residency: Residency | None = None,
    ) -> None:
        self._store, self._attempts, self._claimer = store, attempts, claimer
        self._membership, self._reaper = membership, reaper
        self._control, self._operator = control, operator
        self._status, self._watchdog, self._stages = status, watchdog, stages
        self._residency = residency
        self._outage = Outage()
        self._check_seconds = lease_seconds / CHECKS_PER_LEASE
        self._grace, self._on_idle = grace, on_idle
        self.aborted = False  # asked twice to stop
        self.serves = False  # takes commands and claims jobs
        self.stop_at: float | None = None  # end of the grace period; monotonic, as all times here
        self._stop_logged = False
        self._next_check = 0.0

    @property
    def redis_fails(self) -> bool:
        """True from an error of Redis on, until it replies again. Any thread may read."""
        return self._outage.lasts

    def request_stop(self) -> None:
        """First call: claim no more jobs, give running ones the grace period. Second: end now."""
        self.aborted = self.stop_at is not None
        self.stop_at = time.monotonic() + (0.0 if self.aborted else self._grace)
        self._claimer.stop()
        if self._residency is not None:
            self._residency.stop()
        self._membership.announce_stop()
        self._attempts.wake()

    def run(self) -> None:
        """Serve until stopped. If the engine dies, returns all jobs and raises JobError."""
        self._watchdog.touch()  # the start may have waited for Redis
        self._membership.keep_lease()
        self._join()
        self.serves = True
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
                    self._advance_commands()
                    self._check()
                    run("answering operators", self._operator.send)
                    self._enforce_deadlines()
                    if self._residency is not None:
                        run("bringing models in", self._residency.step)
                    run("looking for jobs", self._claimer.look)
                    if not run("claiming jobs", self._claimer.claim):
                        self._claimer.claim_soon()
                    if self._outage.lasts:
                        self._store.ping()  # the round may have sent no command
                except redis.RedisError as error:
                    self._claimer.claim_soon()  # the claim that failed is repeated
                    self._wait(self._outage.failed(error, len(self._attempts)))
                else:
                    self._outage.ended()
            crashed = False
        finally:
            self._shut_down(crashed)

    def _join(self) -> None:
        """Register the worker and subscribe to its commands. Waits while Redis is away, unless the
        worker is stopped: its models took minutes to load. Raises other errors of Redis."""
        while not self._finished():
            self._watchdog.touch()
            try:
                self._membership.register()
                self._control.subscribe()
            except redis.RedisError as error:
                if not may_pass(error):
                    raise
                self._wait(self._outage.failed(error, 0))
            else:
                self._outage.ended()
                return

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
            self._claimer.claim_soon()  # the batch has room again
            if not self._attempts:
                self._on_idle()

    def _handle_commands(self) -> None:
        for command in self._control.commands():
            if isinstance(command, Cancel):
                self._cancel(command.job)
            elif isinstance(command, OperatorCommand):
                self._operator.start(command)
            elif self.stop_at is None:
                self.request_stop()

    def _advance_commands(self) -> None:
        """Advance the commands of operators. What the worker says about itself is published before
        it answers, and what a command may have changed has an effect in this round."""
        if self._operator.advance():
            self._next_check = 0.0
            self._claimer.claim_soon()

    def _check(self) -> None:
        """Do the periodic checks, if they are due: report to Redis, drop the jobs that other
        workers have taken over, return those of dead workers, and decide whether jobs may be
        claimed."""
        now = time.monotonic()
        if now < self._next_check:
            return
        sick, pause = self._claimer.sick, self._claimer.pause
        status = self._status.read(now, sick, pause, claims=self.stop_at is None)
        jobs, run = [attempt.lease.job for attempt in self._attempts], self._stages.run
        run("reporting", lambda: self._membership.report(status, jobs))
        run("checking leases", self._check_leases)
        run("looking for dead workers", lambda: self._reaper.reap(set(self._attempts.leases)))
        run("checking for pauses", self._claimer.update_pause)
        run("looking for suspects", self._claimer.make_room_for_suspects)
        self._next_check = now + self._check_seconds

    def _enforce_deadlines(self) -> None:
        for attempt in self._attempts:
            if attempt.deadline is not None and clock.now() >= attempt.deadline:
                attempt.stop(attempt.overdue)

    # --- helpers ----------------------------------------------------------------------------------

    def _finished(self) -> bool:
        if self.stop_at is not None and time.monotonic() >= self.stop_at:
            return True
        stops = self.stop_at is not None or self._claimer.drained
        return stops and not self._attempts.any_unsettled

    def _collect_timeout(self) -> float:
        if self._attempts.any_unsettled:
            return BUSY_SECONDS
        due = min(self._next_check, self._claimer.due)
        longest = COMMAND_SECONDS if self._operator.any_running else IDLE_WAIT_SECONDS
        return min(max(BUSY_SECONDS, due - time.monotonic()), longest)

    def _cancel(self, job: str) -> None:
        attempt = self._attempts.get(job)
        if attempt is not None:
            attempt.stop(JobError("cancelled", f"job {job} was cancelled"))

    def _check_leases(self) -> None:
        attempts = list(self._attempts)
        checked = self._store.leases.check([attempt.lease for attempt in attempts])
        for attempt, (held, cancelled) in zip(attempts, checked, strict=True):
            if not held:
                job, about = attempt.lease.job, {"job": attempt.lease.job}
                logger.warning("lost the lease of job %s: dropping it", job, extra=about)
                self._attempts.drop(attempt)
                self._store.leases.forget([attempt.lease])
            elif cancelled:
                self._cancel(attempt.lease.job)

    def _wait(self, seconds: float) -> None:
        """Keep everything and pause: each stage is repeated after an error, without loss."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and not self._finished():
            self._attempts.take(left)

    def _shut_down(self, crashed: bool) -> None:
        """Return the jobs that have not ended and sign off. A crash counts against its jobs."""
        self.serves = False
        self._log_stop()  # if the last round took longer than the grace period
        unfinished = len(self._attempts)
        for attempt in self._attempts:
            attempt.stop(JobError("cancelled", "the worker stops"))
        self._claimer.close()  # the jobs that return wake other workers
        try:
            self._stages.run("settling jobs", self._attempts.settle)
            self._operator.stop()
            self._stages.run("answering operators", self._operator.send)
            leases = self._attempts.leases
            if crashed:
                self._reaper.reclaim_own(leases)
            elif leases:
                self._store.leases.give_back(leases)
            if leases:
                logger.info("returned to the queues: %s", counted(len(leases), "unfinished job"))
            self._membership.leave()
            self._claimer.pass_on()
        except redis.RedisError as error:
            logger.warning(
                "Redis fails (%s): other workers get %s when this worker's lease expires",
                error,
                counted(unfinished, "job"),
            )
        finally:
            self._membership.close()
            self._control.close()
