"""All transitions of the jobs of some models' queues, in the name of one worker.

`worker.queue.loop` decides when. Written against RQ 2.12; the contract tests compare the result
with what RQ itself writes and reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from redis import Redis, RedisError

from jobs import keys
from jobs.operations import OPERATIONS
from jobs.store import rq_layout
from jobs.store.backlog import Backlog, BacklogCounter
from jobs.store.claim import Claim, Claims
from jobs.store.claimed_job import ClaimedJob, Lease
from jobs.store.damage import readable
from jobs.store.eviction import eviction
from jobs.store.job_end import Settler
from jobs.store.leases import Leases
from jobs.store.maintenance import Maintenance
from jobs.store.served_queues import ServedQueues
from jobs.store.settlement import Settlement
from jobs.store.worker_status import WorkerStatuses, read_statuses
from jobs.store.workers import DeadWorker

SOON = 70.0  # seconds: more than the longest pause before a retry


class JobStore:
    """The jobs of the models' queues in one Redis. `models`: the names that have queues, whose
    owner may change them. `funcs`: whose jobs are run. `leases`: those of the worker."""

    def __init__(
        self,
        redis: Redis,
        models: Collection[str],
        worker: str,
        worker_key: str,
        funcs: Collection[str] = OPERATIONS.keys(),
    ) -> None:
        self._client = redis
        self._redis: Any = redis  # its stubs type neither pipelines nor replies as bytes
        self._models, self.queues = models, ServedQueues(models, funcs)
        self._claims = Claims(redis, worker)
        self._settler = Settler(redis, worker, worker_key)
        self.leases = Leases(redis, worker)
        self.maintenance = Maintenance(redis, self.queues)
        self._backlog = BacklogCounter(redis)

    def model_of(self, lease: Lease) -> tuple[str, bool]:
        """The model, by the name in the job's queue, and whether that is the queue of bulk jobs."""
        return keys.model_of(lease.queue), keys.is_bulk(lease.queue)

    def claim(
        self,
        room: Callable[[str, bool], int],
        contexts: Mapping[str, int] | None = None,
        *,
        suspects: bool = False,
    ) -> Claim:
        """Take jobs, interactive ones before bulk ones. `room(model, bulk)`: for sequences.
        `contexts`: the tokens that a sequence may have, by the names of models, as far as that is
        known. `suspects`: take a group of suspects instead, if any wait."""
        queues = self.queues.now()
        most = [room(keys.model_of(queue), keys.is_bulk(queue)) for queue in queues]
        tokens = [(contexts or {}).get(keys.model_of(queue), 0) for queue in queues]
        return self._claims.claim(queues, most, tokens, suspects=suspects)

    def read(self, lease: Lease) -> ClaimedJob:
        """The job of a lease, as its hash is now."""
        return self._claims.read(lease)

    def workers(self) -> WorkerStatuses:
        """What the workers publish about themselves."""
        return read_statuses(self._client)

    def settle(
        self, settlements: Sequence[Settlement], dead: DeadWorker | None = None
    ) -> list[bool]:
        """End jobs in one round trip; False for each whose lease is lost. `dead`: the worker whose
        jobs these are; nothing is changed if it turns out to be alive."""
        return self._settler.settle(settlements, dead)

    def settle_each(self, settlements: Sequence[Settlement]) -> list[bool | RedisError]:
        """`settle`, with the error in the place of each that Redis has refused."""
        return self._settler.settle_each(settlements)

    def leases_of(self, dead: DeadWorker) -> Leases:
        """The leases of a dead worker, whose queues may be any."""
        return Leases(self._client, dead)

    # --- looking ----------------------------------------------------------------------------------

    def ping(self) -> None:
        """Raise redis.RedisError unless Redis replies."""
        self._redis.ping()

    def any_waiting(self) -> bool:
        """True if a job waits in the queues, in quarantine or for its time."""
        kinds = (rq_layout.queue_key, keys.quarantine, keys.tenants, rq_layout.scheduled_key)
        names = [key(queue) for key in kinds for queue in self.queues]
        return bool(names and self._redis.exists(*names))

    def any_unsettled(self) -> bool:
        """True if any worker has claimed a job of the queues, a suspect waits, or a job is due
        within SOON seconds, as after an error."""
        now, _ = self._redis.time()
        soon = now + SOON
        pipeline = self._redis.pipeline(transaction=False)
        for queue in self.queues:
            pipeline.zcard(rq_layout.wip_key(queue))
            pipeline.llen(keys.quarantine(queue))
            pipeline.zcount(rq_layout.scheduled_key(queue), "-inf", soon)
        return any(readable(pipeline))

    def next_due(self) -> float:
        """The time of the next scheduled job, in seconds since the epoch; infinity without one."""
        pipeline = self._redis.pipeline(transaction=False)
        for queue in self.queues:
            pipeline.zrange(rq_layout.scheduled_key(queue), 0, 0, withscores=True)
        firsts = readable(pipeline, unreadable=())
        return min((due for first in firsts for _, due in first), default=math.inf)

    def suspects(self) -> set[str]:
        """The queues whose suspects wait for an idle worker."""
        pipeline, queues = self._redis.pipeline(transaction=False), self.queues.now()
        for queue in queues:
            pipeline.exists(keys.quarantine(queue))
        found = zip(queues, pipeline.execute(), strict=True)
        return {queue for queue, waits in found if waits}

    def eviction(self) -> str:
        """A sentence that says why Redis may evict keys, and what to do; "" if it can't."""
        return eviction(self._redis.info("memory"))

    def backlog(self) -> Backlog:
        """The rows that wait for Parquet."""
        return self._backlog.read()
