"""Checks at start that the Redis user of a worker, or a recorder, has the rights that it needs.

Otherwise the first job or row that needs a missing right would find it, or nobody would, if it is
that of a channel. Each command is tried on keys of its own, which are deleted at once, since a user
may not ask Redis about its rights.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import redis
from redis.exceptions import NoPermissionError
from rq.command import PUBSUB_CHANNEL_TEMPLATE

from jobs import keys, lua
from jobs.errors import JobError
from jobs.store.connection.connect import user_name

PROBE = lua.load("jobs.store", "probe")

# Each command that workers send, in scripts or alone. Most fail on a key that does not exist, or
# change nothing.
COMMANDS = (
    *("COPY KEY OTHER", "DEL KEY", "EXISTS KEY", "EXPIRE KEY 1", "PERSIST KEY", "PEXPIRE KEY 1"),
    *("PTTL KEY", "RENAME KEY OTHER", "TTL KEY", "TYPE KEY", "MEMORY USAGE KEY"),
    *("GET KEY", "MGET KEY", "SET KEY 1 PX 1000"),
    *("HDEL KEY a", "HEXISTS KEY a", "HGET KEY a", "HGETALL KEY", "HINCRBY KEY a 1"),
    *(
        "HINCRBYFLOAT KEY a 1",
        "HKEYS KEY",
        "HLEN KEY",
        "HMGET KEY a",
        "HSET KEY a 1",
        "HSETNX KEY a 1",
    ),
    *(
        "LINDEX KEY 0",
        "LINSERT KEY AFTER a b",
        "LLEN KEY",
        "LPOP KEY",
        "LPOS KEY a",
        "LPUSH KEY a",
        "LRANGE KEY 0 0",
        "LREM KEY 1 a",
    ),
    *("LTRIM KEY 0 0", "RPOP KEY", "RPUSH KEY a", "BLPOP KEY 1"),
    *("SADD KEY a", "SCARD KEY", "SISMEMBER KEY a", "SMEMBERS KEY", "SRANDMEMBER KEY 1"),
    *("SREM KEY a", "SSCAN KEY 0"),
    *("XADD KEY * a 1", "XDEL KEY 1-1", "XLEN KEY", "XRANGE KEY - +", "XREVRANGE KEY + -"),
    *("ZADD KEY 1 a", "ZCARD KEY", "ZCOUNT KEY 0 1", "ZRANGE KEY 0 0", "ZRANGEBYSCORE KEY 0 1"),
    *("ZREM KEY a", "ZREVRANGE KEY 0 0"),
    *("ZREVRANGEBYSCORE KEY 1 0", "ZSCORE KEY a"),
    *("PUBLISH chatjobs:{probe}:live 1", "TIME"),
)

# Those among them that a recorder process sends.
RECORDER_COMMANDS = tuple(
    command
    for command in COMMANDS
    if command.split()[0]
    in {
        *("DEL", "EXISTS", "PEXPIRE", "PTTL", "TYPE", "GET", "MGET", "SET", "PUBLISH", "TIME"),
        *("HDEL", "HEXISTS", "HGET", "HGETALL", "HKEYS", "HLEN", "HSET"),
        *("SCARD", "SMEMBERS", "SREM", "XDEL", "XLEN", "XRANGE", "XREVRANGE"),
        *("ZADD", "ZRANGE", "ZRANGEBYSCORE", "ZREM"),
    }
)


class ProbeKeys(NamedTuple):
    key: str
    other: str


def check_rights(client: redis.Redis) -> None:
    """Raises JobError, naming the rights, if the user of this connection lacks some that a worker
    needs. Raises redis.RedisError."""
    missing = [
        *_missing_of_keys(client, ("chatjobs:", "rq:"), COMMANDS),
        *_missing_of_channels(client),
    ]
    _refuse(client, "a worker", missing)


def check_recorder_rights(client: redis.Redis) -> None:
    """`check_rights` of a recorder process."""
    _refuse(client, "a recorder", [*_missing_of_keys(client, ("chatjobs:",), RECORDER_COMMANDS)])


def _refuse(client: redis.Redis, who: str, missing: Sequence[str]) -> None:
    """Raise JobError if rights are missing."""
    if missing:
        user, rights = user_name(client), " ".join(dict.fromkeys(missing))
        raise JobError(
            "unavailable",
            f"the Redis user '{user}' lacks rights that {who} needs ({rights}): grant them (ACL "
            f"SETUSER {user} {rights}), or give --redis the user for workers (docs/operations.md, "
            "Users)",
        )


def _missing_of_keys(
    client: redis.Redis, prefixes: Sequence[str], commands: Sequence[str]
) -> Iterable[str]:
    probe = client.register_script(PROBE)
    for prefix in prefixes:
        name = f"{prefix}probe-{uuid.uuid4().hex}"
        try:
            refused: Any = probe(keys=ProbeKeys(name, f"{name}-2"), args=commands)
        except NoPermissionError as error:
            yield _right(str(error), f"~{prefix}*")
            continue
        for number, reason in refused:
            of_channel = commands[number - 1].startswith("PUBLISH")
            yield _right(reason.decode(), "&chatjobs:*" if of_channel else f"~{prefix}*")


def _missing_of_channels(client: redis.Redis) -> Iterable[str]:
    for channel, right in (
        (keys.CONTROL, "&chatjobs:*"),
        (PUBSUB_CHANNEL_TEMPLATE % "probe", "&rq:*"),
    ):
        with client.pubsub() as pubsub:  # type: ignore[no-untyped-call]
            try:
                pubsub.subscribe(channel)
                pubsub.get_message(timeout=None)
            except NoPermissionError as error:
                yield _right(str(error), right)


def _right(reason: str, otherwise: str) -> str:
    """The right whose absence is the reason: to a command, or the other one."""
    command = re.search(r"'([\w|]+)' command", reason)
    return f"+{command[1]}" if command else otherwise
