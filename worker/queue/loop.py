"""The worker's loop: claims jobs while the batch has room, and settles each one when it has ended.

One process runs many jobs. This thread does all communication with Redis except the recorder's;
the backend generates on its own thread and passes its events to this one through a queue.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

import redis

from jobs.errors import JobError
from worker.backend import Backend, ModelInfo
from worker.queue.attempts import Attempts
from worker.queue.reaper import Reaper
from worker.queue.rq_control import Cancel, Control
from worker.queue.rq_job import ClaimedJob, Lease
from worker.queue.rq_presence import RQPresence
from worker.queue.rq_store import MAX_LOST, RQStore
from worker.queue.watchdog import Watchdog

logger = logging.getLogger(__name__)

LEASE_SECONDS = 12.0  # a worker that does not renew its lease for this long loses its jobs
RENEWALS_PER_LEASE = 4
REAPS_PER_LEASE = 3
POLL_SECONDS = (0.005, 0.03)  # pause between polls of empty queues: the first, the longest
BUSY_SECONDS = 0.005  # wait for the engine's next event while jobs run
BACKLOG_ROWS = 20_000  # rows waiting for Parquet above which no jobs are claimed
RETRY_SECONDS = (0.1, 5.0)  # pause after a Redis error: the first, the longest


class WorkerLoop:
    """`run` serves until the worker is stopped. Its collaborators are constructor arguments.

    models: by each name that has queues. grace: seconds that running jobs get after the first
    request to stop. burst: end when no job is queued, or started by any worker. on_idle: called
    when the last running job is settled.
    """

    def __init__(
        self,
        backend: Backend,
        models: Mapping[str, ModelInfo],
        store: RQStore,
        presence: RQPresence,
        control: Control,
        attempts: Attempts,
        watchdog: Watchdog,
        reaper: Reaper,
        *,
        grace: float,
        burst: bool,
        on_idle: Callable[[], None],
    ) -> None:
        self._backend, self._store, self._attempts = backend, store, attempts
        self._presence, self._control = presence, control
        self._watchdog, self._reaper = watchdog, reaper
        self._models = {name: model.name for name, model in models.items()}
        self._grace, self._burst, self._on_idle = grace, burst, on_idle
        self.aborted = False  # asked twice to stop
        self._stop_at: float | None = None  # end of the grace period
        self._stop_logged = False
        self._next_renewal = self._next_reap = self._next_poll = 0.0  # monotonic, as all times here
        self._poll_pause = POLL_SECONDS[0]
        self._retry_pause: float | None = None  # set while Redis fails
        self._pause_reason = ""  # why no jobs are claimed
        self._drained = False  # the last poll found no job, queued or started
        self._isolating = False  # claim nothing until the running job has ended

    def request_stop(self) -> None:
        """First call: claim no more jobs, give running ones the grace period. Second: end now."""
        self.aborted = self._stop_at is not None
        self._stop_at = time.monotonic() + (0.0 if self.aborted else self._grace)
        self._attempts.wake()

    def run(self) -> None:
        """Serve until stopped. If the engine dies, returns all jobs and raises JobError."""
        self._presence.birth()
        self._control.subscribe()
        crashed = True
        try:
            while not self._finished():
                self._attempts.collect(self._collect_timeout())
                self._log_stop()
                try:
                    self._attempts.publish()
                    self._settle()
                    self._handle_commands()
                    self._renew_lease()
                    self._reap()
                    self._enforce_deadlines()
                    self._claim()
                except redis.RedisError as error:
                    self._wait_for_redis(error)
                else:
                    self._reset_retry()
            crashed = False
        finally:
            self._shut_down(crashed)

    # --- stages of a round ------------------------------------------------------------------------

    def _log_stop(self) -> None:
        """Log the request to stop, once; not in `request_stop`, since signal handlers call it."""
        if self._stop_at is not None and not self._stop_logged:
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
            elif self._stop_at is None:
                self.request_stop()

    def _renew_lease(self) -> None:
        """When it is due, check the engine and renew the worker's lease; drop the jobs that other
        workers have taken over."""
        now = time.monotonic()
        if now < self._next_renewal:
            return
        hangs = self._watchdog.hangs(now)
        if not hangs:
            self._presence.renew(
                {
                    "models": sorted(set(self._models.values())),
                    "names": sorted(self._models),
                    **self._watchdog.report,
                },
                [attempt.lease.job for attempt in self._attempts],
            )
        self._check_leases()
        self._update_pause(hangs)
        self._next_renewal = now + self._presence.lease_seconds / RENEWALS_PER_LEASE

    def _reap(self) -> None:
        now = time.monotonic()
        if now >= self._next_reap:
            self._reaper.reap(set(self._attempts.leases))
            self._next_reap = now + self._presence.lease_seconds / REAPS_PER_LEASE

    def _enforce_deadlines(self) -> None:
        now = time.time()
        for attempt in self._attempts:
            if attempt.deadline is not None and now >= attempt.deadline:
                attempt.stop(attempt.overdue)

    def _claim(self) -> None:
        """Claim jobs while the batch has room. A job takes as much room as it has choices, so some
        of the claimed jobs may not fit: they go back before their attempt has started."""
        now = time.monotonic()
        if self._stop_at is not None or self._pause_reason or now < self._next_poll:
            return
        if self._isolating and self._attempts:
            return
        self._isolating = False
        room = {model: max(0, self._backend.room(model)) for model in set(self._models.values())}
        if not any(room.values()):
            return
        claimed = self._store.claim({name: room[model] for name, model in self._models.items()})
        accepted = self._isolate_suspects(claimed)
        if len(accepted) < len(claimed):
            self._store.give_back([job.lease for job in claimed[len(accepted) :]], uncount=True)
        surplus: list[Lease] = []
        for job in accepted:
            model = self._models[self._store.model_of(job.lease)]
            if room[model] > 0:
                room[model] -= self._attempts.start(job)
                self._renew_lease()  # starting many jobs may take seconds
            else:
                surplus.append(job.lease)
        if surplus:
            self._store.give_back(surplus, uncount=True)
        if claimed:
            self._drained, self._poll_pause = False, POLL_SECONDS[0]
        else:
            # A job that another worker has started comes back if that worker dies.
            self._drained = self._burst and all(room.values()) and not self._store.any_started()
            self._next_poll = now + self._poll_pause
            self._poll_pause = min(1.5 * self._poll_pause, POLL_SECONDS[1])

    # --- helpers ----------------------------------------------------------------------------------

    def _finished(self) -> bool:
        if self._stop_at is not None and time.monotonic() >= self._stop_at:
            return True
        if self._attempts.leases:
            return False
        return self._stop_at is not None or self._drained

    def _collect_timeout(self) -> float:
        if self._attempts.leases:
            return BUSY_SECONDS
        return max(0.0, self._next_poll - time.monotonic()) or POLL_SECONDS[1]

    def _isolate_suspects(self, claimed: Sequence[ClaimedJob]) -> Sequence[ClaimedJob]:
        """The first of the claimed jobs that may run together. A suspect, which fails if one more
        worker dies with it, runs alone: so no other job fails with it."""
        for number, job in enumerate(claimed):
            if job.lost >= MAX_LOST - 1:
                self._isolating = True
                return claimed[:number] if number or self._attempts else claimed[:1]
        return claimed

    def _cancel(self, job: str) -> None:
        attempt = self._attempts.get(job)
        if attempt is not None:
            attempt.stop(JobError("cancelled", f"job {job} was cancelled"))

    def _check_leases(self) -> None:
        attempts = list(self._attempts)
        checked = self._store.check([attempt.lease for attempt in attempts])
        for attempt, (held, cancelled) in zip(attempts, checked, strict=True):
            if not held:
                logger.warning("lost the lease of job %s: dropping it", attempt.lease.job)
                self._attempts.drop(attempt)
            elif cancelled:
                self._cancel(attempt.lease.job)

    def _update_pause(self, hangs: bool) -> None:
        """Stop or resume claiming."""
        reason = ""
        if hangs:
            reason = "the engine has work but makes no progress"
        elif self._presence.suspended():
            reason = "suspended by rq"
        elif self._store.waiting_rows() > BACKLOG_ROWS:
            reason = f"more than {BACKLOG_ROWS} rows wait for Parquet"
        if reason and reason != self._pause_reason:
            logger.warning("not claiming jobs: %s", reason)
        elif self._pause_reason and not reason:
            logger.info("claiming jobs again")
        self._pause_reason = reason

    def _wait_for_redis(self, error: redis.RedisError) -> None:
        """Keep everything and pause: each stage is repeated after an error, without loss."""
        if self._retry_pause is None:
            logger.warning("Redis fails (%s): keeping %d running jobs", error, len(self._attempts))
            self._retry_pause = RETRY_SECONDS[0]
        until = time.monotonic() + self._retry_pause
        self._retry_pause = min(2 * self._retry_pause, RETRY_SECONDS[1])
        while (left := until - time.monotonic()) > 0 and not self.aborted:
            self._attempts.take(left)

    def _reset_retry(self) -> None:
        if self._retry_pause is not None:
            logger.info("Redis is back")
            self._retry_pause = None

    def _shut_down(self, crashed: bool) -> None:
        """Return the jobs that have not ended and sign off. A crash counts against its jobs."""
        self._log_stop()  # if the last round took longer than the grace period
        unfinished = len(self._attempts)
        for attempt in self._attempts:
            attempt.stop(JobError("cancelled", "the worker stops"))
        try:
            self._attempts.settle()
            leases = self._attempts.leases
            if crashed:
                self._reaper.reclaim_own(leases)
            elif leases:
                self._store.give_back(leases)
            if leases:
                logger.info("returned %d unfinished jobs to their queues", len(leases))
            self._presence.death()
        except redis.RedisError as error:
            logger.warning(
                "Redis fails (%s): %d jobs go to other workers when this worker's lease expires",
                error,
                unfinished,
            )
        finally:
            self._control.close()
