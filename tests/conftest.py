"""A real Redis server for the tests: one private server per session, flushed before each test."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest
import redis

from jobs.embedded import EmbeddedRedis

# Shells start background jobs with SIGINT ignored, and the commands under test would inherit it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

PATIENCE = 10.0  # seconds


@pytest.fixture(scope="session")
def redis_server() -> Iterator[EmbeddedRedis]:
    """A server with a unix socket and a TCP port."""
    with EmbeddedRedis(port=0) as server:
        yield server


@pytest.fixture
def redis_url(redis_server: EmbeddedRedis) -> Iterator[str]:
    """URL of an empty database. Fails a test that leaves a subscription behind."""
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
        yield redis_server.url
        deadline = time.monotonic() + PATIENCE
        while channels := client.pubsub_channels():
            assert time.monotonic() < deadline, f"still subscribed: {channels}"
            time.sleep(0.01)
