"""The keys of a Redis as text, by type and value, which any version of any server can load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# Bytes are stored as the text with the same code points, whose JSON is ASCII.
CODE = "latin-1"


def save(redis: Any, path: Path) -> None:
    """Write all keys, one a line, by name: their types, values, and milliseconds to live."""
    lines = []
    for key in sorted(redis.scan_iter("*")):
        kind = redis.type(key).decode()
        record = {
            "key": key,
            "type": kind,
            "ttl": redis.pttl(key),
            "value": _read(redis, key, kind),
        }
        lines.append(json.dumps(_texts(record)))
    path.write_text("\n".join(lines) + "\n")


def load(redis: Any, path: Path) -> None:
    """Write the keys of a file of `save`. Their times to live begin anew."""
    for line in path.read_text().splitlines():
        record = json.loads(line)
        key, value = record["key"].encode(CODE), record["value"]
        _write(redis, key, record["type"], value)
        if record["ttl"] > 0:
            redis.pexpire(key, record["ttl"])


def _read(redis: Any, key: bytes, kind: str) -> Any:
    if kind == "string":
        return redis.get(key)
    if kind == "list":
        return redis.lrange(key, 0, -1)
    if kind == "set":
        return sorted(redis.smembers(key))
    if kind == "zset":
        return [
            [member, repr(score)] for member, score in redis.zrange(key, 0, -1, withscores=True)
        ]
    if kind == "hash":
        return sorted(redis.hgetall(key).items())
    assert kind == "stream"
    last = redis.xinfo_stream(key)["last-generated-id"]
    return {
        "last": last,
        "entries": [[name, [*fields.items()]] for name, fields in redis.xrange(key)],
    }


def _write(redis: Any, key: bytes, kind: str, value: Any) -> None:
    if kind == "string":
        redis.set(key, value.encode(CODE))
    elif kind in ("list", "set"):
        members = [one.encode(CODE) for one in value]
        (redis.rpush if kind == "list" else redis.sadd)(key, *members)
    elif kind == "zset":
        redis.zadd(key, {member.encode(CODE): float(score) for member, score in value})
    elif kind == "hash":
        redis.hset(key, mapping={name.encode(CODE): one.encode(CODE) for name, one in value})
    else:
        for name, fields in value["entries"]:
            redis.xadd(key, {one.encode(CODE): two.encode(CODE) for one, two in fields}, id=name)
        if not value["entries"]:
            redis.xadd(key, {"-": "-"}, id=value["last"])
            redis.xdel(key, value["last"])
        redis.execute_command("XSETID", key, value["last"])


def _texts(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode(CODE)
    if isinstance(value, dict):
        return {name: _texts(one) for name, one in value.items()}
    return [_texts(one) for one in value] if isinstance(value, list | tuple) else value
