"""A real Redis server for the tests: one private server per session, flushed before each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from jobs.embedded import EmbeddedRedis


@pytest.fixture(scope="session")
def redis_server() -> Iterator[EmbeddedRedis]:
    """A server with a unix socket and a TCP port."""
    with EmbeddedRedis(port=0) as server:
        yield server


@pytest.fixture
def redis_url(redis_server: EmbeddedRedis) -> str:
    """URL of an empty database."""
    client = redis.Redis.from_url(redis_server.url)
    client.flushall()
    client.close()
    return redis_server.url
