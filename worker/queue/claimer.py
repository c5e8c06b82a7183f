"""Claims jobs while the batch has room, and starts them.

It claims nothing during a pause, or while the circuit breaker of this machine is open. Suspects,
with which workers have died, run apart from all other jobs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from jobs import keys
from jobs.store.claimed_job import ClaimedJob, Lease
from jobs.store.job_store import JobStore
from jobs.store.workers import Workers
from worker.backend import Backend
from worker.queue.admission import Admission
from worker.queue.attempts import Attempts
from worker.queue.capacity import Capacity
from worker.queue.circuit_breaker import CircuitBreaker
from worker.queue.served import Served
from worker.queue.waker import Waker
from worker.queue.watchdog import Watchdog

BURST_SECONDS = 0.1  # pause between polls of empty queues if the worker ends when all is done


class Claimer:
    """Owns the time of the next claim. Used by the loop's thread.

    lease_seconds: of the worker. burst: poll, and note when the queues are `drained`. others_wait:
    True if jobs wait for models that are not open.
    """

    def __init__(
        self,
        backend: Backend,
        served: Served,
        store: JobStore,
        workers: Workers,
        attempts: Attempts,
        admission: Admission,
        breaker: CircuitBreaker,
        watchdog: Watchdog,
        waker: Callable[[str, Callable[[], None]], Waker],
        *,
        lease_seconds: float,
        burst: bool,
        others_wait: Callable[[], bool] = lambda: False,
    ) -> None:
        self._others_wait = others_wait
        self._backend, self._served, self._store = backend, served, store
        self._workers, self._attempts, self._watchdog = workers, attempts, watchdog
        self._admission, self._breaker = admission, breaker
        self._lease_seconds, self._burst = lease_seconds, burst
        self.drained = False  # with `burst`: no job is queued, or started by any worker
        self._stopped = self._woken = False
        self._next_claim = 0.0  # monotonic
        self._isolating = False  # claim nothing until the running jobs have ended
        self._suspects: set[str] = set()  # queues whose quarantine had jobs at the last look
        self._waker = waker(keys.wake_worker(workers.name), self._wake)

    @property
    def sick(self) -> str:
        """The failures of jobs because of which nothing is claimed; "" if there is none."""
        return self._breaker.reason

    @property
    def pause(self) -> str:
        """The other reason for which nothing is claimed; "" if there is none."""
        return self._admission.pause

    @property
    def due(self) -> float:
        """The monotonic time of the next claim, unless the waker comes first; infinity while
        nothing may be claimed."""
        if self.pause or not self._breaker.may_claim():
            return math.inf
        return self._next_claim

    def stop(self) -> None:
        """Claim no more jobs. May be called from any thread."""
        self._stopped = True

    def claim_soon(self) -> None:
        """Claim in the next round: the batch has room again, or a claim has failed."""
        self._next_claim = 0.0

    def look(self) -> None:
        """Look for jobs of producers that wake no worker, once a second."""
        self._waker.look(self._store.any_waiting)

    def claim(self) -> None:
        """Claim jobs if it is time to, and start them."""
        now = time.monotonic()
        waits = now < self._next_claim and not self._woken
        if self.pause:
            self._waker.pass_on(())  # another worker may claim the job that has woken this one
        if self._stopped or self.pause or waits:
            return
        idle = not self._attempts.any_unsettled
        if idle:
            self._breaker.settled()
        if (self._isolating and not idle) or not self._breaker.may_claim():
            return
        capacity = Capacity(self._backend, self._served, single=self._breaker.half_open)
        self._waker.pass_on(capacity.wake_keys)
        if self._served.open_names and not capacity.any:
            return
        self._woken = False  # before the claim: it may be set while that runs
        contexts = self._served.contexts
        found, held_seconds = self._store.claim(capacity.of, contexts, suspects=idle)
        funcs = self._backend.funcs
        self._start([job for job in found if not job.belongs_to_others(funcs)], capacity)
        others = [job for job in found if job.belongs_to_others(funcs)]
        if others:
            self._store.leases.hand_on(others)
        if found:
            self.drained, self._next_claim = False, 0.0
        else:
            # A job that another worker has started comes back if that worker dies.
            none_left = capacity.everywhere and held_seconds == math.inf
            self.drained = (
                self._burst
                and none_left
                and not self._store.any_unsettled()
                and not self._others_wait()
            )
            pause = min(held_seconds, BURST_SECONDS if self._burst else math.inf)
            self._next_claim = now + pause
            self._waker.arm(capacity.wake_keys)

    def update_pause(self) -> None:
        """Look at what may stop this worker from claiming jobs."""
        self._admission.update()

    def make_room_for_suspects(self) -> None:
        """Suspects are taken by idle workers. If a busy one sees them wait at two checks, no worker
        is idle: then one per queue claims nothing until it is idle itself."""
        if not self._attempts or self.pause:
            return
        waiting = {
            queue for queue in self._store.suspects() if self._served.is_open(keys.model_of(queue))
        }
        for queue in self._suspects & waiting:
            if self._workers.elect_isolated(queue, self._lease_seconds):
                self._isolating = True
        self._suspects = waiting

    def close(self) -> None:
        """Wait for no more jobs. Raises nothing; `pass_on` follows."""
        self._waker.close()

    def pass_on(self) -> None:
        """Wake another worker for the job that has woken this one. Raises redis.RedisError."""
        self._waker.pass_on(())

    def _start(self, claimed: Sequence[ClaimedJob], capacity: Capacity) -> None:
        """Start jobs. Those that do not fit go back before their attempt has started: some that
        other programs have enqueued have more sequences than the claim knew."""
        self._isolating = any(job.suspect for job in claimed)
        surplus: list[Lease] = []
        epoch = self._breaker.epoch
        if claimed:
            self._breaker.claimed()
        for job in claimed:
            name, bulk = self._store.model_of(job.lease)
            may_start = not self._stopped and self._breaker.epoch == epoch
            refusal = self._served.refusal(name)
            if refusal is not None:
                self._attempts.refuse(job, refusal)
            elif may_start and capacity.of(name, bulk):
                capacity.use(name, bulk, self._attempts.start(job))
                self._watchdog.touch()  # starting many jobs may take minutes
            else:
                surplus.append(job.lease)
        if surplus:
            self._store.leases.give_back(surplus, undo_attempt=True)

    def _wake(self) -> None:
        """Note that a job may wait. Called by the waker's thread, which sets nothing else here."""
        self._woken = True
        self._attempts.wake()
