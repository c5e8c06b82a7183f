"""Reads how many jobs each queue holds, by their state, and how long the first one has waited."""

from __future__ import annotations

from typing import Any

from redis import Redis

from jobs import keys
from jobs.operations import CHAT
from jobs.store.rq_layout import (
    deferred_key,
    job_key,
    parse_time,
    queue_key,
    queue_names,
    registry_key,
    scheduled_key,
    wip_key,
)


def read_queues(redis: Redis) -> list[dict[str, Any]]:
    """Depth of every chatjobs queue, by name. `oldest_s`: for how long the first of its queued jobs
    has waited, in seconds by the clock of Redis; 0 if there is none. Of the jobs of tenants, that
    is the first of whoever is served next.

    Reads the keys directly: asking RQ's registries for their length would run their clean-up.
    """
    names = [name for name in queue_names(redis) if keys.is_queue(name)]
    with redis.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.llen(queue_key(name))
            pipe.llen(keys.quarantine(name))
            pipe.hget(keys.TENANT_JOBS, name)
            pipe.zcard(deferred_key(name))
            pipe.zcard(scheduled_key(name))
            pipe.zcard(wip_key(name))
            pipe.zcard(registry_key(name, "failed"))
        replies = pipe.execute(raise_on_error=False)
    waits = _oldest(redis, names)
    depths = iter([_count(reply) for reply in replies])
    return [
        {
            "name": name,
            "model": keys.model_of(name),
            "func": keys.func_of(name) or CHAT.func,
            "queued": next(depths) + next(depths) + next(depths),
            "deferred": next(depths),
            "scheduled": next(depths),
            "running": next(depths),
            "failed": next(depths),
            "oldest_s": wait,
        }
        for name, wait in zip(names, waits, strict=True)
    ]


def _oldest(redis: Any, names: list[str]) -> list[float]:
    """For how long the first queued job of each queue has waited."""
    with redis.pipeline(transaction=False) as pipe:
        pipe.time()
        for name in names:
            pipe.lindex(queue_key(name), 0)
            pipe.zrange(keys.tenants(name), 0, 0)
        (seconds, microseconds), *found = pipe.execute(raise_on_error=False)
        for name, tenants in zip(names, found[1::2], strict=True):
            tenant = tenants[0].decode(errors="replace") if _is_filled(tenants) else ""
            pipe.lindex(keys.tenant_queue(name, tenant), 0)
        of_tenants = pipe.execute(raise_on_error=False)
        for jobs in zip(found[::2], of_tenants, strict=True):
            for job in jobs:
                known = job.decode(errors="replace") if isinstance(job, bytes) else ""
                pipe.hget(job_key(known), "enqueued_at")
        times = pipe.execute(raise_on_error=False)
    now = seconds + microseconds / 1e6
    moments = [parse_time(one) if isinstance(one, bytes) else None for one in times]
    ages = [0.0 if one is None else max(0.0, now - one) for one in moments]
    return [round(max(pair), 1) for pair in zip(ages[::2], ages[1::2], strict=True)]


def _is_filled(reply: Any) -> bool:
    """True for a list with an element, as opposed to the error of a key of another type."""
    return isinstance(reply, list) and bool(reply)


def _count(reply: Any) -> int:
    """A number in a reply of Redis; 0 for a key of another type, which is reported on its own."""
    if isinstance(reply, bytes):
        return int(reply) if reply.isdigit() and len(reply) < 16 else 0
    return reply if isinstance(reply, int) else 0
