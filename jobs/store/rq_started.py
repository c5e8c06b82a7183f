"""The jobs that a worker has started, for the one that returns them when it has died."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from redis import Redis
from redis.exceptions import OutOfMemoryError

from jobs import keys
from jobs.results.failures import Failure, parse_failures
from jobs.store import rq_format, rq_scripts
from jobs.store.damage import is_damage
from jobs.store.rq_format import ATTEMPT, FAILURES
from jobs.store.rq_job import LOST, LOST_AT, Lease
from jobs.store.rq_scripts import ReturnArgs, lease_args, return_keys
from jobs.store.rq_workers import DeadWorker

logger = logging.getLogger(__name__)

LOST_SECONDS = 3600.0  # after this time without a death, those of before no longer count


@dataclass(frozen=True, slots=True)
class StartedJob:
    """`lost`: the workers that died while they ran it, and count."""

    lease: Lease
    lost: int
    group: str = ""  # of suspects, that it returns to
    failures: tuple[Failure, ...] = ()


class RQStarted:
    """The started jobs of any worker. `worker` is its name; `dead` is given if it isn't this one,
    and then nothing changes if it turns out to be alive."""

    def __init__(self, redis: Redis) -> None:
        self._redis: Any = redis
        self._return = redis.register_script(rq_scripts.RETURN)

    def of(self, worker: str) -> list[StartedJob]:
        """The jobs that a worker has started, in the order of its claims."""
        entries = self._entries(keys.started(worker))
        if not entries:
            return []
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.time()
        for _, job, _ in entries:
            pipeline.hmget(rq_format.job_key(job), ATTEMPT, LOST, LOST_AT, FAILURES)
        (now, _), *found = pipeline.execute(raise_on_error=False)
        for reply in found:
            if isinstance(reply, Exception) and not is_damage(reply):
                raise reply
        found = [(None,) * 4 if isinstance(reply, Exception) else reply for reply in found]
        return [
            StartedJob(
                Lease(job, queue, execution, _number(attempt)),
                _number(lost) if abs(now - _number(lost_at)) < LOST_SECONDS else 0,
                failures=tuple(parse_failures(failures)),
            )
            for (execution, job, queue), (attempt, lost, lost_at, failures) in zip(
                entries, found, strict=True
            )
        ]

    def _entries(self, key: str) -> list[list[str]]:
        """Execution, job and queue of each entry. What no worker has written is removed: a dead
        worker would never leave."""
        entries = []
        for entry in self._redis.zrange(key, 0, -1):
            parts = entry.decode(errors="replace").split(" ", 2)
            if len(parts) == 3 and "\ufffd" not in entry.decode(errors="replace"):
                entries.append(parts)
            else:
                logger.error("removed %r from %s in Redis: no worker has written it", entry, key)
                self._redis.zrem(key, entry)
        return entries

    def give_back(self, leases: Sequence[Lease], worker: str, dead: DeadWorker | None) -> None:
        """Return jobs to the front of their queues, in their order: no death counts."""
        self._return_all(((lease, {}) for lease in reversed(leases)), worker, dead)

    def reclaim(self, jobs: Sequence[StartedJob], worker: str, dead: DeadWorker | None) -> None:
        """Return jobs, in their order, to the front of their queues; those with a group to the
        front of the quarantine. Their counts of deaths become `lost`, and their failures are
        written. All of them, or none, unless Redis is full."""
        now, _ = self._redis.time()
        counted = (
            (
                job.lease,
                {
                    "lost": job.lost,
                    "lost_at": now,
                    "group": job.group,
                    "failures": json.dumps(job.failures),
                },
            )
            for job in reversed(jobs)
        )
        self._return_all(counted, worker, dead)

    def _return_all(
        self,
        returns: Iterable[tuple[Lease, dict[str, Any]]],
        worker: str,
        dead: DeadWorker | None,
    ) -> None:
        all_args = [
            (lease, ReturnArgs(*lease_args(lease, dead), "LPUSH", **more))
            for lease, more in returns
        ]
        for transaction in (True, False):
            pipeline = self._redis.pipeline(transaction=transaction)
            for lease, args in all_args:
                self._return(keys=return_keys(lease, worker), args=args, client=pipeline)
            try:
                pipeline.execute()
                return
            except OutOfMemoryError:  # a full Redis 7.0 refuses transactions
                if not transaction:
                    raise


def _number(value: bytes | None) -> int:
    """A count in a job's hash; 0 for anything else that a producer may have written there."""
    return int(value) if value is not None and value.isdigit() and len(value) < 16 else 0
