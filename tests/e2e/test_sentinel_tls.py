"""Sentinel and its primary behind TLS: `rediss+sentinel://` speaks TLS with both."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import trustme

from jobs import AsyncClient, Client, JobError
from jobs.embedded import EmbeddedRedis, server_binary
from tests.servers import Sentinel
from tests.worker.queue.test_secure_redis import tls_proxy

REQUEST: Any = {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}
NEVER = 10**9  # milliseconds: this Sentinel cannot speak TLS with the primary it names


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """The URL without its options. The authority is in `authority.pem`."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "authority.pem"))
    certificate = authority.issue_cert("localhost", "127.0.0.1")
    with EmbeddedRedis(port=0) as server:
        assert server.port is not None
        with closing(tls_proxy(server.port, certificate)) as primary:
            sentinel = Sentinel(server_binary(), tmp_path / "sentinel", primary.port, NEVER)
            sentinel.start()
            try:
                with closing(tls_proxy(sentinel.port, certificate)) as front:
                    yield f"rediss+sentinel://localhost:{front.port}/main"
            finally:
                sentinel.kill()


def test_sentinel_and_primary_are_reached_through_tls(address: str, tmp_path: Path) -> None:
    url = f"{address}?ssl_ca_certs={tmp_path / 'authority.pem'}"
    with Client(url) as client:
        job = client.submit(REQUEST)
        assert job.status() == "queued"

    async def cancel() -> bool:
        async with AsyncClient(url) as client:
            return await client.job(job.id).cancel()

    assert asyncio.run(cancel())


def test_a_certificate_of_another_authority_is_refused(address: str, tmp_path: Path) -> None:
    other = tmp_path / "other.pem"
    trustme.CA().cert_pem.write_to_path(str(other))
    url = f"{address}?ssl_ca_certs={other}"
    with Client(url) as client, pytest.raises(JobError, match="Sentinel") as caught:
        client.submit(REQUEST)
    assert caught.value.code == "unavailable"
    assert "certificate verify failed" in caught.value.message
    assert "name the authority of the server's certificate" in caught.value.message

    async def submit() -> None:
        async with AsyncClient(url) as client:
            await client.submit(REQUEST)

    with pytest.raises(JobError, match="certificate verify failed"):
        asyncio.run(submit())
