"""Pipelines of scripts: one round trip, also on a server that does not have the scripts."""

from __future__ import annotations

import inspect
import tomllib
from asyncio import run
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from packaging.requirements import Requirement
from redis import Redis, TimeoutError, asyncio, connection, sentinel
from redis.asyncio import connection as async_connection
from redis.asyncio import sentinel as async_sentinel
from redis.client import Pipeline

from jobs.store.connection import protocol
from jobs.store.connection.connect import SOCKET_SECONDS, connect, connect_async
from jobs.store.connection.protocol import PAUSE_SECONDS, command, retry

SCRIPT = "return ARGV[1]"
OTHER = "return {ARGV[1]}"


@pytest.fixture
def no_writes(redis_url: str) -> Iterator[Redis]:
    """A client of a server that replies to commands that write later."""
    with connect(redis_url) as redis:
        redis.execute_command("CLIENT", "PAUSE", 3_600_000, "WRITE")
        try:
            yield redis
        finally:
            redis.execute_command("CLIENT", "UNPAUSE")


def test_a_command_without_a_reply_is_not_sent_again(no_writes: Redis, redis_url: str) -> None:
    """A server that hangs would keep each of the next ones waiting as long."""
    url = f"{redis_url}{'&' if '?' in redis_url else '?'}socket_timeout=0.2"

    def increment() -> None:
        with connect(url) as client:
            client.incr("x")

    def enqueue() -> None:
        with connect(url) as client:
            client.pipeline(transaction=False).incr("x").execute()

    async def increment_async() -> None:
        async with connect_async(url) as client:
            await client.incr("x")

    for call in (increment, enqueue, lambda: run(increment_async())):
        before = no_writes.info("stats")["total_connections_received"]
        with pytest.raises(TimeoutError):
            call()
        assert no_writes.info("stats")["total_connections_received"] == before + 1


def test_reads_are_tried_again_for_half_a_minute_from_their_first_try(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However long each try waits for a reply."""
    now = 1000.0
    monkeypatch.setattr(protocol, "time", SimpleNamespace(monotonic=lambda: now))
    steps, tries = retry(command("get", "x")), 0
    call: Any = next(steps)
    with pytest.raises(TimeoutError):
        while True:
            tries += 1
            now += SOCKET_SECONDS
            steps.throw(TimeoutError("no reply"))
            now += PAUSE_SECONDS
            call = next(steps)
    assert (tries, call.name) == (3, "get")


@pytest.mark.parametrize("raise_on_error", [True, False])
def test_a_pipeline_loads_only_the_scripts_that_the_server_does_not_have(
    redis_url: str, raise_on_error: bool
) -> None:
    with connect(redis_url) as redis:
        script, other = redis.register_script(SCRIPT), redis.register_script(OTHER)
        redis.script_flush()
        redis.script_load(OTHER)
        redis.config_resetstat()
        pipeline = redis.pipeline(transaction=False)
        for number in range(3):
            script(args=[number], client=pipeline)
            other(args=[number], client=pipeline)
            pipeline.incr("runs")
        replies = pipeline.execute(raise_on_error=raise_on_error)
        assert replies == [b"0", [b"0"], 1, b"1", [b"1"], 2, b"2", [b"2"], 3]
        assert redis.info("commandstats").get("cmdstat_script|exists") is None


def test_a_pipeline_whose_scripts_the_server_has_sends_nothing_else(redis_url: str) -> None:
    with connect(redis_url) as redis:
        script = redis.register_script(SCRIPT)
        redis.script_load(SCRIPT)
        redis.config_resetstat()
        pipeline = redis.pipeline(transaction=False)
        script(args=[1], client=pipeline)
        assert pipeline.execute() == [b"1"]
        commands = set(redis.info("commandstats"))
        assert commands <= {"cmdstat_evalsha", "cmdstat_config|resetstat", "cmdstat_info"}


def test_a_transaction_loads_its_scripts_first(redis_url: str) -> None:
    with connect(redis_url) as redis:
        script = redis.register_script(SCRIPT)
        redis.script_flush()
        pipeline = redis.pipeline(transaction=True)
        pipeline.incr("runs")
        script(args=[1], client=pipeline)
        assert pipeline.execute() == [1, b"1"]


# Methods of redis-py that transport.py overrides or calls, private or with parameters that its
# documentation does not have, and their parameters.
CONNECTIONS = (
    *(connection.Connection, connection.SSLConnection, connection.UnixDomainSocketConnection),
    *(sentinel.SentinelManagedConnection, sentinel.SentinelManagedSSLConnection),
)
ASYNC_CONNECTIONS = (
    *(async_connection.Connection, async_connection.SSLConnection),
    *(async_connection.UnixDomainSocketConnection, async_sentinel.SentinelManagedConnection),
    async_sentinel.SentinelManagedSSLConnection,
)
PRIVATE: list[tuple[Any, str, list[str]]] = [
    *((kind, "_construct_command_packer", ["packer"]) for kind in CONNECTIONS),
    *((kind, "send_command", ["args", "kwargs"]) for kind in CONNECTIONS),
    *((kind, "send_packed_command", ["command", "check_health"]) for kind in CONNECTIONS),
    *((kind, "read_response", ["disable_decoding", "timeout"]) for kind in CONNECTIONS),
    *((kind, "send_command", ["args", "kwargs"]) for kind in ASYNC_CONNECTIONS),
    *((kind, "send_packed_command", ["command"]) for kind in ASYNC_CONNECTIONS),
    *((kind, "connect_check_health", []) for kind in (*CONNECTIONS, *ASYNC_CONNECTIONS)),
    *((kind, "disconnect", []) for kind in (*CONNECTIONS, *ASYNC_CONNECTIONS)),
    *((kind, "read_response", ["disable_decoding", "timeout"]) for kind in ASYNC_CONNECTIONS),
    *((kind, "set_parser", ["parser_class"]) for kind in (*CONNECTIONS, *ASYNC_CONNECTIONS)),
    *((one.DefaultParser, "parse_error", ["response"]) for one in (connection, async_connection)),
    *(
        (one.DefaultParser, "handle_pubsub_push_response", ["response"])
        for one in (connection, async_connection)
    ),
    (connection.HiredisRespSerializer, "pack", ["args"]),
    (Pipeline, "load_scripts", []),
    (Pipeline, "_execute_transaction", ["connection", "commands", "raise_on_error"]),
    (Pipeline, "_execute_pipeline", ["connection", "commands", "raise_on_error"]),
    (Pipeline, "raise_first_error", ["commands", "response"]),
    (sentinel.SentinelConnectionPool, "disconnect", ["inuse_connections"]),
    (async_sentinel.SentinelConnectionPool, "disconnect", ["inuse_connections"]),
    (sentinel.Sentinel, "master_for", ["service_name", "redis_class", "connection_pool_class"]),
    (async_sentinel.Sentinel, "master_for", ["service_name", "redis_class"]),
]


def test_messages_of_channels_are_written_to_no_log(
    redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    with connect(redis_url) as redis, redis.pubsub() as pubsub:
        pubsub.subscribe("c")
        pubsub.get_message(timeout=None)
        redis.publish("c", "sync")
        assert pubsub.get_message(timeout=None)["data"] == b"sync"

    async def main() -> None:
        async with connect_async(redis_url) as redis, redis.pubsub() as pubsub:
            await pubsub.subscribe("c")
            await pubsub.get_message(timeout=None)
            await redis.publish("c", "async")
            message: Any = await pubsub.get_message(timeout=None)
            assert message["data"] == b"async"

    run(main())
    assert "push_response" not in {one.name for one in caplog.records}


@pytest.mark.parametrize(
    ("owner", "name", "parameters"),
    PRIVATE,
    ids=[f"{owner.__module__}.{owner.__qualname__}.{name}" for owner, name, _ in PRIVATE],
)
def test_the_methods_of_redis_py_that_are_overridden_are_there(
    owner: Any, name: str, parameters: list[str]
) -> None:
    found = [one for one in inspect.signature(getattr(owner, name)).parameters if one != "self"]
    assert found[: len(parameters)] == parameters


def test_connections_have_the_attributes_that_are_read() -> None:
    for kind in (connection.Connection, async_connection.Connection):
        made: Any = kind(password="x", socket_timeout=3.0)
        assert made.socket_timeout == 3.0
        assert made.password == "x"
        assert made.is_connected is False
    assert asyncio.Redis().connection_pool.connection_kwargs is not None
    pipeline = redis.Redis().pipeline()
    assert pipeline.scripts == set()


def test_only_versions_that_were_tried_are_installed() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    needed = [Requirement(one) for one in project["project"]["dependencies"]]
    (of_redis,) = [one for one in needed if one.name == "redis"]
    assert redis.__version__ in of_redis.specifier
    assert "9.0.0" not in of_redis.specifier
    assert "8.0.0" not in of_redis.specifier
