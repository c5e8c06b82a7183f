"""An error about the values in keys is a Damaged, wherever Redis puts it in a reply."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fakeredis
import pytest
import redis

from jobs.store.connection.connect import connect, connect_async
from jobs.store.damage import Damaged
from jobs.testing.connections import ScriptingRedis

ROOT = Path(__file__).parents[3]
NESTED = "return {redis.pcall('LPUSH', KEYS[1], 'x'), 1}"
NAMING = "return redis.error_reply('WRONGTYPE rq:queue:chat:m is a hash, not a list')"


def pipelined(client: Any, *, transaction: bool) -> Any:
    pipeline = client.pipeline(transaction=transaction)
    pipeline.lpush("key", "x")
    return pipeline.execute(raise_on_error=False)[0]


def in_asyncio(client: redis.Redis) -> Any:
    async def run() -> Any:
        path = client.connection_pool.connection_kwargs["path"]
        async with connect_async(f"unix://{path}") as found:
            return await found.lpush("key", "x")

    return asyncio.run(run())


PLACES: dict[str, Callable[[Any], Any]] = {
    "command": lambda client: client.lpush("key", "x"),
    "number": lambda client: client.incr("key"),
    "pipeline": lambda client: pipelined(client, transaction=False),
    "transaction": lambda client: pipelined(client, transaction=True),
    "script": lambda client: client.eval("return redis.call('LPUSH', KEYS[1], 1)", 1, "key"),
    "reply of a script": lambda client: client.eval(NESTED, 1, "key")[0],
    "asyncio": in_asyncio,
}


def error_of(place: Callable[[Any], Any], client: Any) -> Any:
    client.set("key", "no list")
    try:
        return place(client)
    except redis.RedisError as error:
        return error


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_an_error_about_a_value_is_damaged(place: Callable[[Any], Any], redis_url: str) -> None:
    with connect(redis_url) as client:
        assert isinstance(error_of(place, client), Damaged)


@pytest.mark.parametrize("place", sorted(PLACES.keys() - {"asyncio", "transaction"}))
def test_it_is_one_in_the_memory_of_a_test_too(place: str) -> None:
    client = ScriptingRedis(server=fakeredis.FakeServer())
    assert isinstance(error_of(PLACES[place], client), Damaged)


def test_errors_about_anything_else_are_none(redis_url: str) -> None:
    with connect(redis_url) as client:
        with pytest.raises(redis.exceptions.NoScriptError):
            client.evalsha("0" * 40, 0)
        client.acl_setuser("poor", enabled=True, nopass=True, commands=["+ping"])
        poor = connect(redis_url.replace("unix://", "unix://poor:x@"))
        with pytest.raises(redis.exceptions.NoPermissionError):
            poor.get("key")
        poor.close()
        client.acl_deluser("poor")


def test_the_key_that_a_script_names_is_found_without_a_look(redis_url: str) -> None:
    with connect(redis_url) as client, pytest.raises(Damaged) as caught:
        client.eval(NAMING, 0)
    (found,) = caught.value.found
    assert found.key == "rq:queue:chat:m" and "RENAME" in found.remedy


def test_one_place_tells_damage_from_other_errors() -> None:
    files = [path for package in ("jobs", "worker") for path in (ROOT / package).rglob("*.py")]
    tells = re.compile(r"type\(\w+\) is (not )?(redis\.)?ResponseError")
    assert [path for path in files if tells.search(path.read_text())] == [
        ROOT / "jobs/store/damage.py"
    ]
