"""The jobs that wait in the queues of some models: how many, and for how long the first one has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from redis import Redis

from jobs import keys
from jobs.store.rq_layout import job_key, parse_time, queue_key
from jobs.store.served_queues import queues_of

TENANTS = 16  # of a queue, whose first jobs are looked at


class Waiting(NamedTuple):
    """Of the queues of one name of a model."""

    jobs: int
    oldest: float  # seconds


def read_waiting(redis: Redis, models: Sequence[str]) -> dict[str, Waiting]:
    """By the names of the models; those without jobs are left out. A key of another type counts as
    empty. Raises redis.RedisError."""
    queues = {
        queue: model
        for model in models
        for bulk in (False, True)
        for queue in queues_of(model, bulk=bulk)
    }
    pipeline: Any = redis.pipeline(transaction=False)
    for queue in queues:
        pipeline.llen(queue_key(queue))
        pipeline.llen(keys.quarantine(queue))
        pipeline.hget(keys.TENANT_JOBS, queue)
    replies = iter(pipeline.execute(raise_on_error=False))
    counts = {queue: sum(count_of(next(replies)) for _ in range(3)) for queue in queues}
    filled = [queue for queue, count in counts.items() if count]
    found: dict[str, Waiting] = {}
    if filled:
        for queue, oldest in zip(filled, oldest_waits(redis, filled), strict=True):
            before = found.get(queues[queue], Waiting(0, 0.0))
            found[queues[queue]] = Waiting(before.jobs + counts[queue], max(before.oldest, oldest))
    return found


def oldest_waits(redis: Redis, queues: Sequence[str]) -> list[float]:
    """For how long the first job of each queue has waited, in seconds by the clock of Redis; 0 if
    there is none. Of tenants, the TENANTS that are served next count."""
    pipeline: Any = redis.pipeline(transaction=False)
    pipeline.time()
    for queue in queues:
        pipeline.zrange(keys.tenants(queue), 0, TENANTS - 1)
    (seconds, microseconds), *of_queues = pipeline.execute(raise_on_error=False)
    lists = [
        (number, name)
        for number, (queue, tenants) in enumerate(zip(queues, of_queues, strict=True))
        for name in (queue_key(queue), keys.quarantine(queue), *_lists_of(queue, tenants))
    ]
    for _, name in lists:
        pipeline.lindex(name, 0)
    firsts = [
        one if isinstance(one, bytes) else b"" for one in pipeline.execute(raise_on_error=False)
    ]
    for job in firsts:
        pipeline.hget(job_key(job.decode(errors="replace")), "enqueued_at")
    times = pipeline.execute(raise_on_error=False)
    now, waits = seconds + microseconds / 1e6, [0.0] * len(queues)
    for (number, _), text in zip(lists, times, strict=True):
        moment = parse_time(text) if isinstance(text, bytes) else None
        if moment is not None:
            waits[number] = max(waits[number], now - moment)
    return waits


def _lists_of(queue: str, tenants: Any) -> list[str]:
    names = tenants if isinstance(tenants, list) else []
    return [keys.tenant_queue(queue, one.decode(errors="replace")) for one in names if one]


def count_of(reply: Any) -> int:
    """A number in a reply of Redis; 0 for a key of another type, which is reported on its own."""
    if isinstance(reply, bytes):
        return int(reply) if reply.isdigit() and len(reply) < 16 else 0
    return reply if isinstance(reply, int) else 0
