"""The limits of queues, requests and rows: names, defaults and the operator's values.

An operator's values are in one hash in Redis, so that all producers and workers obey the same ones:
the script that enqueues a job reads them, and so do workers when they claim jobs.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeGuard

from redis import Redis

from jobs import keys
from jobs.encoding import encodable
from jobs.errors import invalid

MODEL_LIMITS = ("jobs", "bytes")  # these may differ for one model
TENANT_LIMITS = ("tenant_running",)  # and these for one tenant


class Limits(NamedTuple):
    """Bytes are 2**20 per MiB. docs/limits.md says what happens at each limit."""

    jobs: int = 1_000_000  # of one model that have not ended
    bytes: int = 2 * 2**30  # of the requests of these jobs, compressed
    request_bytes: int = 16 * 2**20  # of one request, as JSON
    message_bytes: int = 8 * 2**20  # of one message of it, as JSON
    row_bytes: int = 64 * 2**20  # of the row of one job, as JSON
    session_bytes: int = 8 * 2**20  # of the turns of one session, as JSON
    tenant_running: int = 1_000_000  # jobs of one tenant that run, over all workers
    outbox_bytes: int = 2**30  # of the rows of all runs that wait for Parquet, about


DEFAULTS = Limits()
MAX_LIMIT = 2**53  # Lua's numbers are exact up to here


def read_limits(redis: Redis) -> Limits:
    """The limits for models that have none of their own."""
    stored: Any = redis.hmget(keys.LIMITS, Limits._fields)
    return parse_limits(stored)


def parse_limits(values: list[bytes | None]) -> Limits:
    """Limits from the values of their fields in Redis. A value that is no number is the default."""
    return Limits(
        *(
            int(value) if _is_limit(value) else default
            for value, default in zip(values, DEFAULTS, strict=True)
        )
    )


def read_own_limits(redis: Redis) -> dict[str, int]:
    """The limits of single models and tenants, by `<limit>:<model or tenant>`."""
    stored: Any = redis.hgetall(keys.LIMITS)
    names = {name.decode(errors="replace"): value for name, value in stored.items()}
    return {
        name: int(value)
        for name, value in sorted(names.items())
        if name.partition(":")[0] in MODEL_LIMITS + TENANT_LIMITS
        and ":" in name
        and _is_limit(value)
    }


def _is_limit(value: bytes | None) -> TypeGuard[bytes]:
    return value is not None and value.isdigit() and len(value) <= len(str(MAX_LIMIT))


def check_limit(
    name: str, value: int | None, model: str | None = None, tenant: str | None = None
) -> None:
    """Raise InvalidRequest for a limit that does not exist or can't be set for one model or
    tenant."""
    if name not in Limits._fields:
        raise invalid(f"there is no limit {name!r}: the limits are {', '.join(Limits._fields)}")
    if model is not None and name not in MODEL_LIMITS:
        raise invalid(f"{name} is the same for all models; of one model: {', '.join(MODEL_LIMITS)}")
    if tenant is not None and (name not in TENANT_LIMITS or model is not None):
        raise invalid(f"{name} is not a limit of a tenant; of one tenant: {TENANT_LIMITS[0]}")
    if value is not None and value < 0:
        raise invalid(f"{name}: a limit is at least 0, got {value}")
    if value is not None and value > MAX_LIMIT:
        raise invalid(f"{name}: a limit is at most {MAX_LIMIT}")
    for kind, own in (("model", model), ("tenant", tenant)):
        if own is None:
            continue
        if not own:
            raise invalid(f"{kind}: a name has at least one character, got ''")
        if encodable(own) != own:
            raise invalid(f"{kind}: {own!r} is not valid UTF-8")


def set_limit(
    redis: Redis,
    name: str,
    value: int | None,
    model: str | None = None,
    tenant: str | None = None,
) -> None:
    """Set a limit for all producers and workers, or for one model or tenant alone; None: back to
    the default. Raises InvalidRequest as `check_limit` does.
    """
    check_limit(name, value, model, tenant)
    own = tenant if model is None else model
    field = name if own is None else f"{name}:{own}"
    if value is None:
        redis.hdel(keys.LIMITS, field)
    else:
        redis.hset(keys.LIMITS, field, value)
    if name in TENANT_LIMITS:
        _unpark(redis, tenant)


def _unpark(redis: Any, tenant: str | None) -> None:
    """Let a tenant take its turn again in all queues; None: all that are at their limit."""
    for queue in redis.hkeys(keys.TENANT_JOBS):
        tenants = keys.tenants(queue.decode(errors="replace"))
        parked = redis.zrangebyscore(tenants, keys.PARKED, "+inf") if tenant is None else [tenant]
        if parked:
            redis.zadd(tenants, dict.fromkeys(parked, 0), xx=True)
