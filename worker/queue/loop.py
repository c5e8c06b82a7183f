"""The RQ side of the worker: takes jobs while the batch has room, and sees each one to its end.

One process runs many jobs. This thread does all the talking with Redis: it claims, publishes,
settles, heeds cancellations and time limits, keeps the worker's lease, and returns the jobs of
workers that died. Generation happens in the backend's own thread; a queue leads from there to here.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import redis
from rq.suspension import is_suspended
from rq.worker import BaseWorker
from rq.worker.base import WorkerStatus

from jobs import keys
from jobs.errors import JobError
from jobs.stream.writer import StreamWriter
from worker.backend import Backend, ModelInfo
from worker.queue.attempt import Reporter, worker_lost
from worker.queue.attempts import Attempts
from worker.queue.publisher import Publisher
from worker.queue.rq_job import ClaimedJob, Lease
from worker.queue.rq_store import MAX_LOST, RQStore
from worker.queue.watchdog import Watchdog

logger = logging.getLogger(__name__)

LEASE_SECONDS = 12.0  # a worker that is silent for this long has lost its jobs
BEATS = 4  # how often the lease is renewed in that time
REAPS = 3  # how often it is looked for dead workers in that time
LOOK_SECONDS = (0.005, 0.03)  # pauses between looks into empty queues: the first, the longest
BUSY_SECONDS = 0.005  # how long a busy worker waits for the engine before it looks around
BACKLOG_ROWS = 20_000  # rows waiting for Parquet at which no more jobs are taken
RETRY_SECONDS = (0.1, 5.0)  # pauses while Redis is away: the first, the longest


class WorkerLoop(BaseWorker):
    """RQ's view of us: a worker of the models' queues. `run` is its whole life.

    Times are in seconds. grace: what running jobs get after the first signal; lease_seconds: a
    worker that is silent for so long loses its jobs to others; hang_seconds: an engine that is busy
    and makes no step for so long counts as dead. on_idle: told when the last running job is
    settled. burst: end when no job is queued, or running here or with another worker.
    """

    def __init__(
        self,
        backend: Backend,
        client: redis.Redis,
        models: Sequence[ModelInfo],
        *,
        name: str,
        grace: float,
        burst: bool,
        lease_seconds: float,
        hang_seconds: float,
        on_idle: Callable[[], None],
    ) -> None:
        by_reference = {model.reference: model for model in models}
        served = {**by_reference, **{model.name: model for model in models}}
        key = self.redis_worker_namespace_prefix + name
        self._ledger = RQStore(client, list(served), name, key)
        super().__init__(self._ledger.queues, name=name, connection=client, serializer="json")
        self._backend, self._served = backend, served
        self._grace, self._burst, self._lease_seconds = grace, burst, lease_seconds
        self._on_idle = on_idle
        provenance = {name: asdict(model) for name, model in served.items()}
        self._report = Reporter(name, self.hostname or "", provenance)
        publisher = Publisher(StreamWriter(client))
        self._flights = Attempts(backend, served, self._ledger, publisher, self._report)
        self._pulse = Watchdog(backend, hang_seconds)
        self._control = client.pubsub(ignore_subscribe_messages=True)  # type: ignore[no-untyped-call]
        self._stop_at: float | None = None  # monotonic time at which grace ends
        self.hurried = False  # asked twice to stop
        self._next_beat = self._next_reap = self._next_look = 0.0  # monotonic
        self._look_pause = LOOK_SECONDS[0]
        self._retry_pause: float | None = None  # while Redis is away
        self._paused = ""  # why no jobs are taken
        self._drained = False  # the last look found no job
        self._alone = False  # take no jobs until the batch is empty

    # --- life -------------------------------------------------------------------------------------

    def request_stop(self, signum: int | None = None, frame: Any = None) -> None:
        """The first time: no new jobs, running ones get their grace. The second: at once."""
        self.hurried = self._stop_at is not None
        self._stop_at = time.monotonic() + (0.0 if self.hurried else self._grace)
        self._flights.wake()

    def run(self) -> None:
        """Serve until stopped. Raises JobError if the engine dies, after giving all jobs back."""
        self.register_birth()  # type: ignore[no-untyped-call]
        self._control.subscribe(keys.CONTROL, self.pubsub_channel_name)
        crashed = True
        try:
            while not self._over():
                self._flights.listen(self._patience())
                try:
                    self._tick()
                except redis.RedisError as error:
                    self._wait_for_redis(error)
                else:
                    if self._retry_pause is not None:
                        logger.info("Redis is back")
                    self._retry_pause = None
            crashed = False
        finally:
            self._leave(crashed)

    def _over(self) -> bool:
        if self._stop_at is not None and time.monotonic() >= self._stop_at:
            return True
        if self._flights.leases:
            return False
        return self._stop_at is not None or self._drained

    def _patience(self) -> float:
        """How long to wait for the engine's next word."""
        if self._flights.leases:
            return BUSY_SECONDS
        return max(0.0, self._next_look - time.monotonic()) or LOOK_SECONDS[1]

    def _wait_for_redis(self, error: redis.RedisError) -> None:
        """Everything is kept, and tried again after a pause: nothing here is lost by an error."""
        if self._retry_pause is None:
            logger.warning("Redis fails (%s): keeping %d jobs", error, len(self._flights))
            self._retry_pause = RETRY_SECONDS[0]
        until = time.monotonic() + self._retry_pause
        self._retry_pause = min(2 * self._retry_pause, RETRY_SECONDS[1])
        while (left := until - time.monotonic()) > 0 and not self.hurried:
            self._flights.take(left)

    def _tick(self) -> None:
        self._flights.publish()
        if self._flights.settle():
            self._next_look = 0.0  # there is room now
            if not self._flights:
                self._on_idle()
        self._heed_control()
        now = self._beat_in_time()
        if now >= self._next_reap:
            self._reap()
            self._next_reap = now + self._lease_seconds / REAPS
        self._heed_deadlines()
        if self._stop_at is None and not self._paused and now >= self._next_look:
            self._claim(now)

    def _leave(self, crashed: bool) -> None:
        """Give back what still runs, and say goodbye. A crash counts against the jobs it took."""
        left = len(self._flights)
        for execution in self._flights:
            execution.stop(JobError("cancelled", "the worker stops"))
        try:
            self._flights.settle()
            leases = self._flights.leases
            if crashed:
                for lease in reversed(leases):
                    self._lose(lease, None)
            elif leases:
                self._ledger.give_back(leases)
            if leases:
                logger.info("gave %d unfinished jobs back to their queues", len(leases))
            self.connection.delete(keys.worker(self.name))
            self.register_death()  # type: ignore[no-untyped-call]
        except redis.RedisError as error:
            logger.warning(
                "Redis fails (%s): %d jobs go to other workers when this one's lease ends",
                error,
                left,
            )
        finally:
            self._control.close()

    # --- jobs -------------------------------------------------------------------------------------

    def _claim(self, now: float) -> None:
        """Take jobs while there is room. One that asks for several answers takes more of it: what
        doesn't fit any more goes back before anybody has seen that it was away. One that would be
        failed if this worker died, too, runs alone: so it takes no others with it."""
        if self._alone and self._flights:
            return
        self._alone = False
        names = {name: model.name for name, model in self._served.items()}
        room = {model: max(0, self._backend.room(model)) for model in set(names.values())}
        if not any(room.values()):
            return
        claimed = self._ledger.claim({name: room[model] for name, model in names.items()})
        together = self._together(claimed)
        if len(together) < len(claimed):
            self._ledger.give_back([one.lease for one in claimed[len(together) :]], begun=False)
        surplus: list[Lease] = []
        for one in together:
            model = names[self._ledger.model_of(one.lease)]
            if room[model] > 0:
                room[model] -= self._flights.begin(one)
                self._beat_in_time()  # a template may take its seconds
            else:
                surplus.append(one.lease)
        if surplus:
            self._ledger.give_back(surplus, begun=False)
        if claimed:
            self._drained, self._look_pause = False, LOOK_SECONDS[0]
        else:
            # What another worker has may come back, if that one dies.
            self._drained = self._burst and all(room.values()) and not self._ledger.busy()
            self._next_look = now + self._look_pause
            self._look_pause = min(1.5 * self._look_pause, LOOK_SECONDS[1])

    def _together(self, claimed: Sequence[ClaimedJob]) -> Sequence[ClaimedJob]:
        """Those of the first jobs that may run with each other and with what runs here."""
        for number, one in enumerate(claimed):
            if one.lost >= MAX_LOST - 1:
                self._alone = True
                return claimed[:number] if number or self._flights else claimed[:1]
        return claimed

    def _heed_deadlines(self) -> None:
        now = time.time()
        for execution in self._flights:
            if execution.deadline is not None and now >= execution.deadline:
                ttl = execution.request.job.ttl
                reason = f"not done within its ttl of {ttl:g} s"
                execution.stop(JobError("timeout", reason, "job.ttl"))

    def _heed_control(self) -> None:
        """Messages to all workers (cancel), and RQ's to this one (stop-job, shutdown)."""
        while (message := self._control.get_message()) is not None:
            try:
                said = json.loads(message["data"])
                job = said.get("job") or said.get("job_id")
                verb = said.get("op") or said.get("command")
            except (ValueError, RecursionError, AttributeError, TypeError):
                continue
            if verb in ("cancel", "stop-job") and isinstance(job, str):
                self._cancel(job)
            elif verb == "shutdown" and self._stop_at is None:
                self.request_stop()

    def _cancel(self, job: str) -> None:
        execution = self._flights.get(job)
        if execution is not None:
            execution.stop(JobError("cancelled", f"job {job} was cancelled"))

    # --- leases -----------------------------------------------------------------------------------

    def _beat_in_time(self) -> float:
        now = time.monotonic()
        if now >= self._next_beat:
            self._beat(now)
            self._next_beat = now + self._lease_seconds / BEATS
        return now

    def _beat(self, now: float) -> None:
        """Renew the lease, unless the engine hangs; find out which jobs are no longer ours."""
        hangs = self._pulse.take(now)
        if not hangs:
            self._renew()
        executions = list(self._flights)
        checked = self._ledger.check([execution.lease for execution in executions])
        for execution, (held, cancelled) in zip(executions, checked, strict=True):
            if not held:
                logger.warning("lost the lease of job %s: dropping it", execution.lease.job)
                self._flights.drop(execution, JobError("cancelled", "the lease was lost"))
            elif cancelled:
                self._cancel(execution.lease.job)
        self._pause(hangs)

    def _renew(self) -> None:
        said = {
            "name": self.name,
            "host": self.hostname,
            "pid": self.pid,
            "models": sorted({model.name for model in self._served.values()}),
            "names": sorted(self._served),
            "jobs": len(self._flights),
            **self._pulse.said,
        }
        state = WorkerStatus.BUSY if self._flights else WorkerStatus.IDLE
        current = next((execution.lease.job for execution in self._flights), None)
        pipeline = self.connection.pipeline(transaction=False)
        pipeline.set(keys.worker(self.name), json.dumps(said), px=int(self._lease_seconds * 1000))
        self.heartbeat(int(5 * self._lease_seconds) + 1, pipeline=pipeline)
        self.set_state(state, pipeline=pipeline)
        self.set_current_job_id(current, pipeline=pipeline)
        pipeline.execute()

    def _pause(self, hangs: bool) -> None:
        """Take no jobs while there is a reason not to."""
        why = ""
        if hangs:
            why = "the engine makes no step"
        elif is_suspended(self.connection):  # given the worker, it would prolong its life
            why = "suspended by rq"
        elif self._ledger.waiting_rows() > BACKLOG_ROWS:
            why = f"more than {BACKLOG_ROWS} rows wait for Parquet"
        if why != self._paused:
            logger.warning("taking no jobs: %s", why) if why else logger.info("taking jobs again")
        self._paused = why

    def _reap(self) -> None:
        """Return the jobs of workers that died, and claims of ours whose answer never came."""
        known = set(self._flights.leases)
        for name in self._ledger.queues:
            started = self._ledger.started(name)
            own = [one.lease for one in started if one.worker == self.name]
            if strays := [lease for lease in own if lease not in known]:
                self._ledger.give_back(strays)
            for one in reversed(started):  # each goes to the front: the first one last
                if one.worker != self.name and not one.alive:
                    logger.warning("worker %s is gone: job %s", one.worker, one.lease.job)
                    self._lose(one.lease, one.worker)

    def _lose(self, lease: Lease, dead: str | None) -> None:
        """Return a job whose worker (None: this one) died with it, or fail it if it was the last
        one of several."""
        if not self._ledger.reclaim(lease, dead):
            refused = self._report.refused(self._ledger.read(lease), worker_lost(lease))
            self._ledger.settle([refused], absent=dead)

    def clean_registries(self) -> None:
        """RQ's own clean-up would fail or repeat jobs that are well; ours is `_reap`."""
