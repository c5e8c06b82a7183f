"""Stored responses in Redis: what their jobs do not hold, and how many each tenant has.

A response is its job, whose hash and result have the conversation and the answer, and the content
that is stored here. Both expire after the same time.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple

from jobs import keys, lua
from jobs.encoding import from_json, to_json
from jobs.errors import JobError
from jobs.store.connection.protocol import Steps, command, commands, retry

KEEP = lua.load("jobs.store", "keep_response")


# KEYS and ARGV of the script, by name and in order.


class KeepKeys(NamedTuple):
    response: str
    of_tenant: str


class KeepArgs(NamedTuple):
    job_id: str
    tenant: str
    content: str
    seconds: int
    limit: int


class StoredResponse(NamedTuple):
    """`tenant`: empty without keys. `content`: as it was stored, a JSON object."""

    tenant: str
    content: dict[str, Any]


class TooMany(NamedTuple):
    """A tenant has so many stored responses, and may have no more."""

    stored: int


def keep_response(
    job: str, tenant: str, content: dict[str, Any], seconds: int, limit: int | None
) -> Steps[StoredResponse | TooMany | None]:
    """Store the response of a job. Returns the one that is stored already, or None."""
    names = KeepKeys(keys.response(job), keys.tenant_responses(tenant))
    args = KeepArgs(job, tenant, to_json(content), seconds, limit or 0)
    reply, *found = yield from retry(command("eval", KEEP, len(names), *names, *args))
    if reply == b"exists":
        return _stored(job, *found)
    return TooMany(int(found[0])) if reply == b"full" else None


def read_response(job: str) -> Steps[StoredResponse | None]:
    """The stored response of a job; None if there is none."""
    key = keys.response(job)
    tenant, content = yield from retry(command("hmget", key, ["tenant", "content"]))
    return None if content is None else _stored(job, tenant or b"", content)


def forget_response(job: str, tenant: str) -> Steps[None]:
    """Delete what is stored of a response, if there is any. Its job is another matter."""
    deletes = [("delete", keys.response(job)), ("zrem", keys.tenant_responses(tenant), job)]
    yield from retry(commands(deletes))


def unreadable(job: str) -> JobError:
    """The error of a content that no gateway has written."""
    return JobError(
        "internal",
        f"the response of job {job} can't be read: another program has written "
        f"{keys.response(job)}: delete this key (DEL)",
    )


def _stored(job: str, tenant: bytes, content: bytes) -> StoredResponse:
    value: Any = None
    with suppress(ValueError, RecursionError):
        value = from_json(content)
    if not isinstance(value, dict):
        raise unreadable(job)
    return StoredResponse(tenant.decode("utf-8", "replace"), value)
