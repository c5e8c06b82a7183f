"""A power cut: the append-only file ends at its last completed sync. Real servers, slow disks."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from jobs import AsyncClient, JobError, keys
from jobs.store.durable import read_persistence
from tests.jobs.record.outboxes import RUN
from tests.servers import BINARIES, Server
from tests.worker.site import Site, wait_until

pytestmark = pytest.mark.skipif(
    shutil.which("cc") is None, reason="a C compiler makes the library that logs syncs"
)
MakeServer = Callable[..., Server]


@pytest.fixture(params=BINARIES, ids=lambda binary: Path(binary).name)
def make_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeServer]:
    servers = []

    def make(delay: float, **options: str) -> Server:
        server = Server(request.param, tmp_path / f"redis{len(servers)}", **options)
        servers.append(server.log_syncs(delay).start())
        return server

    yield make
    for server in servers:
        server.kill()


def test_a_power_cut_after_a_file_gives_no_job_two_rows(
    make_server: MakeServer, tmp_path: Path
) -> None:
    server = make_server(2.5, appendonly="yes")
    site = Site(server.url, tmp_path / "results")
    jobs = site.client.submit_many(
        [
            {
                "model": "fake",
                "messages": [{"role": "user", "content": f"q{number}"}],
                "job": {"run": RUN, "row": number},
            }
            for number in range(8)
        ],
        durable=True,
    )
    worker = site.worker()
    wait_until(lambda: len(site.rows(RUN)) == 8)
    server.lose_power()
    server.start()
    wait_until(lambda: all(job.status().over for job in jobs))
    # A worker that stops leaves what this slow server does not settle within seconds to others.
    wait_until(lambda: not site.redis.exists(keys.OUTBOXES))
    assert worker.stop() == 0
    site.assert_settled(jobs, RUN)
    site.close()


def test_a_durable_job_survives_a_power_cut(make_server: MakeServer, tmp_path: Path) -> None:
    server = make_server(2.0, appendonly="yes")
    site = Site(server.url, tmp_path / "results")
    request: Any = {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}
    kept = [site.client.submit(request, durable=True)]

    async def submit() -> list[str]:
        async with AsyncClient(server.url) as client:
            one = await client.submit(request, durable=True)
            two, three = await client.submit_many([request, request], durable=True)
            return [one.id, two.id, three.id]

    kept += [site.client.job(job) for job in asyncio.run(submit())]
    lost = site.client.submit(request)
    server.lose_power()
    server.start()
    assert [job.status() for job in kept] == ["queued"] * 4
    assert lost.status() == "unknown"
    site.close()


def test_a_durable_job_needs_an_append_only_file(make_server: MakeServer, tmp_path: Path) -> None:
    server = make_server(0.0)
    site = Site(server.url, tmp_path / "results")
    request: Any = {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}
    with pytest.raises(JobError, match="set appendonly yes") as caught:
        site.client.submit(request, durable=True)
    assert caught.value.code == "invalid_request"
    assert caught.value.param == "durable"
    site.redis.config_set("appendonly", "yes")
    site.redis.config_set("appendfsync", "no")
    with pytest.raises(JobError, match="set appendfsync everysec"):
        site.client.submit(request, durable=True)
    assert not site.redis.exists("rq:queue:chat:fake")
    site.close()


def test_each_synced_write_is_durable_at_once(make_server: MakeServer, tmp_path: Path) -> None:
    server = make_server(0.0, appendonly="yes", appendfsync="always")
    site = Site(server.url, tmp_path / "results")
    job = site.client.submit(
        {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}, durable=True
    )
    server.lose_power()
    server.start()
    time.sleep(0.1)
    assert job.status() == "queued"
    site.close()


def test_a_server_that_loads_its_data_is_no_server_without_a_file(
    make_server: MakeServer, tmp_path: Path
) -> None:
    """Meanwhile INFO says aof_enabled:0, and a job would be refused, or a row written too early."""
    options = {"key_load_delay": "50", "loading_process_events_interval_bytes": "1024"}
    server = make_server(0.0, appendonly="yes", **options)
    with server.client.pipeline(transaction=False) as pipeline:
        for number in range(16_000):
            pipeline.set(f"key{number}", "v")
        pipeline.execute()
    server.stop()
    starting = threading.Thread(target=server.start)
    starting.start()
    client = server.client
    client.set_retry(Retry(NoBackoff(), 0))
    seen: list[bool] = []

    def refused() -> bool:
        try:
            seen.append(read_persistence(client).append_only)
        except redis.BusyLoadingError:
            return True
        except redis.ConnectionError:
            pass
        return False

    wait_until(refused, "the server did not load its data for a while")
    starting.join()
    assert read_persistence(client).append_only
    assert False not in seen
    client.close()
