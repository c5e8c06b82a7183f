"""Reads how many jobs each queue holds, by their state."""

from __future__ import annotations

from typing import Any

from redis import Redis

from jobs import keys
from jobs.operations import CHAT
from jobs.store.rq_layout import (
    deferred_key,
    queue_key,
    queue_names,
    registry_key,
    scheduled_key,
    wip_key,
)


def read_queues(redis: Redis) -> list[dict[str, Any]]:
    """Depth of every chatjobs queue, by name.

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
        }
        for name in names
    ]


def _count(reply: Any) -> int:
    """A number in a reply of Redis; 0 for a key of another type, which is reported on its own."""
    if isinstance(reply, bytes):
        return int(reply) if reply.isdigit() and len(reply) < 16 else 0
    return reply if isinstance(reply, int) else 0
