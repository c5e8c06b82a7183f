"""The id of the queues in one Redis, by which a request that comes back is known. Owns its key."""

from __future__ import annotations

import secrets

from redis import Redis

from jobs import keys
from jobs.api.via import QUEUE_ID
from jobs.errors import JobError
from jobs.store.connection.protocol import Commands, Steps, command
from jobs.store.damage import Damaged, damage_of


def queue_id() -> Steps[str]:
    """The id, which the first one who asks makes. Another program's value is replaced."""
    made = secrets.token_hex(8)
    yield command("set", keys.ID, made, nx=True)
    found = (yield command("get", keys.ID)) or b""
    value: str = found.decode(errors="replace")
    if QUEUE_ID.fullmatch(value):
        return value
    yield command("set", keys.ID, made)
    return made


def read_queue_id(client: Redis) -> str:
    """`queue_id` on a plain client. Raises redis.RedisError, and JobError for a key of another
    type."""
    try:
        return Commands(client).run_steps(queue_id())
    except Damaged as error:
        found = damage_of(client, error, [keys.ID])
        raise JobError("internal", str(found[0] if found else error)) from None
