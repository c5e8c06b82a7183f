"""Fail-overs on real servers: a demoted primary is left, a replica that lags delays the rows."""

from __future__ import annotations

import asyncio
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from click.testing import CliRunner

from jobs import AsyncClient, Client, JobError
from jobs.cli import build
from jobs.client.job import Job
from jobs.store.connection.connect import connect, connect_async
from jobs.store.rq_layout import job_key
from tests.address import Address
from tests.servers import BINARIES, Sentinel, Server, free_port
from tests.worker.fake_backend import FakeBackend
from tests.worker.site import PATIENCE, ROOT, Site, wait_until
from worker.model_spec import ModelSpec
from worker.service import serve

REQUEST: Any = {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}
NEVER = 10**9  # milliseconds
FILLER_BYTES = 64 * 2**20  # more than the buffers of a TCP connection
Start = Callable[..., Server]


@pytest.fixture(params=BINARIES, ids=lambda binary: Path(binary).name)
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Start]:
    """`start(appendonly="yes")`: a server; `start(sentinel_of=primary)`: a Sentinel, which fails
    over after `down_after` milliseconds without a reply."""
    running: list[Server] = []

    def start(sentinel_of: Server | None = None, down_after: int = NEVER, **options: str) -> Server:
        folder = tmp_path / f"redis{len(running)}"
        if sentinel_of is not None:
            folder.mkdir()
            running.append(Sentinel(request.param, folder, sentinel_of.port, down_after))
        else:
            running.append(Server(request.param, folder, **options))
        return running[-1].start()

    yield start
    for server in running:
        server.kill()


def offset(server: Server) -> int:
    """How far a server has come in what its primary writes."""
    info = server.client.info("replication")
    return int(info.get("slave_repl_offset", info["master_repl_offset"]))


def test_clients_and_workers_leave_a_server_that_was_demoted(start: Start, tmp_path: Path) -> None:
    primary = start()
    replica = start().replicate(primary)
    address = Address(primary)
    site = Site(address.url, tmp_path / "results")
    worker = site.worker()
    site.submit("before").result(timeout=PATIENCE)

    async def wait_and_submit() -> str:
        async with AsyncClient(address.url) as client:
            first = await client.submit(REQUEST)
            await first.result(timeout=PATIENCE)
            wait_until(lambda: offset(replica) >= offset(primary))
            replica.client.execute_command("REPLICAOF", "NO", "ONE")
            address.move(replica)
            primary.client.execute_command("REPLICAOF", "127.0.0.1", str(replica.port))
            return (await (await client.submit(REQUEST)).result(timeout=PATIENCE)).text

    assert asyncio.run(wait_and_submit())
    jobs = site.submit_many(["one", "two", "three"])
    for job in jobs:
        assert job.result(timeout=PATIENCE).text
        assert job.cancel() is False
    assert worker.stop() == 0
    assert len(site.rows()) == 6
    site.close()
    address.close()


def test_no_connection_reads_from_a_server_that_another_one_has_left(start: Start) -> None:
    """Nothing of what is written to the new primary reaches the old one, which answers reads."""
    primary = start()
    replica = start().replicate(primary)
    address = Address(primary)
    with connect(address.url) as client:
        pool: Any = client.connection_pool
        idle = [pool.get_connection() for _ in range(3)]
        for one in idle:
            pool.release(one)
        promote(replica, primary, address)
        client.set("written", "now")
        held = [pool.get_connection()]
        while len(held) < 3:
            assert client.get("written") == b"now"
            held.append(pool.get_connection())
        for one in held:
            pool.release(one)
    address.close()


def test_no_asyncio_connection_reads_from_a_server_that_another_one_has_left(start: Start) -> None:
    primary = start()
    replica = start().replicate(primary)
    address = Address(primary)

    async def read() -> None:
        async with connect_async(address.url) as client:
            pool: Any = client.connection_pool
            idle = [await pool.get_connection() for _ in range(3)]
            for one in idle:
                await pool.release(one)
            promote(replica, primary, address)
            await client.set("written", "now")
            held = [await pool.get_connection()]
            while len(held) < 3:
                assert await client.get("written") == b"now"
                held.append(await pool.get_connection())
            for one in held:
                await pool.release(one)

    asyncio.run(read())
    address.close()


def promote(replica: Server, primary: Server, address: Address) -> None:
    """Make the replica the primary. The old one replicates from a server that is not there."""
    wait_until(lambda: offset(replica) >= offset(primary))
    replica.client.execute_command("REPLICAOF", "NO", "ONE")
    address.move(replica)
    primary.client.execute_command("REPLICAOF", "127.0.0.1", str(free_port()))


def test_a_replica_that_lagged_and_was_promoted_gives_no_job_two_rows(
    start: Start, tmp_path: Path
) -> None:
    # However long the worker takes to start, the primary waits for the replica that has stopped.
    patient = {"repl_timeout": "3600", "client_output_buffer_limit": "replica 0 0 0"}
    primary = start(**patient)
    replica = start(**patient).replicate(primary)
    sentinel = start(sentinel_of=primary, down_after=5000)
    wait_until(lambda: sentinel.client.sentinel_slaves("main"))
    site = Site(sentinel.url, tmp_path / "results")
    jobs = site.submit_many([f"q{number}" for number in range(8)], run="r1")
    wait_until(lambda: primary.client.execute_command("WAIT", 1, 100) == 1)
    replica.send(signal.SIGSTOP)
    # What the kernel has taken from the primary reaches a replica that wakes up later. This fills
    # its buffers, so that the primary itself holds what follows.
    primary.client.set("filler", bytes(FILLER_BYTES))
    worker = site.worker()
    wait_until(lambda: all(job.status().over for job in jobs))
    time.sleep(1.0)  # the worker is idle: without a replica, the rows would be written now
    assert site.rows("r1") == []
    primary.kill()
    replica.send(signal.SIGCONT)
    wait_until(lambda: sentinel.client.sentinel_masters()["main"]["port"] == replica.port)
    assert not replica.client.exists("filler")
    site.client.wait_for_rows(jobs, timeout=PATIENCE)
    assert worker.stop() == 0
    site.assert_settled(jobs, "r1")
    site.close()


def test_a_durable_submit_waits_for_a_replica_that_lags(start: Start) -> None:
    primary = start(appendonly="yes")
    replica = start().replicate(primary)
    wait_until(lambda: primary.client.info("replication")["connected_slaves"] == 1)
    replica.send(signal.SIGSTOP)
    submitted: list[Job] = []

    def submit() -> None:
        with Client(primary.url) as client:
            submitted.append(client.submit(REQUEST, durable=True))

    thread = threading.Thread(target=submit)
    thread.start()
    waits = "cmdstat_wait"
    wait_until(lambda: primary.client.info("commandstats").get(waits, {}).get("calls", 0) > 3)
    assert not submitted
    replica.send(signal.SIGCONT)
    thread.join(PATIENCE)
    assert replica.client.exists(job_key(submitted[0].id))


def test_every_client_finds_the_primary_through_sentinel(start: Start, tmp_path: Path) -> None:
    primary = start()
    start().replicate(primary)
    sentinel = start(sentinel_of=primary)
    site = Site(sentinel.url, tmp_path / "results")
    worker = site.worker()
    job = site.submit("hello")
    assert "".join(chunk.text for chunk in job.stream()) == job.result(timeout=PATIENCE).text

    async def follow() -> str:
        async with AsyncClient(sentinel.url) as client:
            return "".join([chunk.text async for chunk in client.job(job.id).stream()])

    assert asyncio.run(follow()) == job.result().text

    def status() -> str:
        result = CliRunner().invoke(build(), ["status", "--redis", sentinel.url])
        assert result.exit_code == 0, result.output
        return result.output

    wait_until(lambda: "fake" in status())
    assert worker.stop() == 0
    assert len(site.rows()) == 1
    site.close()


def test_a_cluster_is_refused_in_one_sentence(start: Start, tmp_path: Path) -> None:
    server = start(cluster_enabled="yes", cluster_port=str(free_port()))
    with Client(server.url) as client:
        for _ in range(2):  # without slots, then with all of them
            with pytest.raises(JobError, match="a Redis Cluster, which chatjobs does not support"):
                client.submit(REQUEST)
            if server.client.cluster("info")["cluster_slots_assigned"] == "0":
                server.client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
                wait_until(lambda: server.client.cluster("info")["cluster_state"] == "ok")
    with pytest.raises(JobError, match="a Redis Cluster, which chatjobs does not support"):
        serve(FakeBackend(), [ModelSpec(reference="fake")], redis_url=server.url, results=tmp_path)


class Locked(Server):
    """Only its administrator may log in."""

    @property
    def url(self) -> str:
        return f"redis://admin:PASSWORD@127.0.0.1:{self.port}/0"


@pytest.mark.parametrize("binary", BINARIES, ids=lambda binary: Path(binary).name)
def test_jobs_outlive_a_restart_with_the_users_of_the_guide(binary: str, tmp_path: Path) -> None:
    """Redis 7.0 loads its append-only file as the user default, and drops what that may not do."""
    guide = (ROOT / "docs/operations/many-boxes.md").read_text("utf-8")
    lines = re.findall(r"^    (user (?:default|admin) .+\n)", guide, re.MULTILINE)
    (tmp_path / "users.acl").write_text("".join(lines))
    aclfile = str(tmp_path / "users.acl")
    server = Locked(binary, tmp_path / "redis", appendonly="yes", aclfile=aclfile)
    try:
        with Client(server.start().url) as client:
            job = client.submit(REQUEST, durable=True)
        server.kill()
        with Client(server.start().url) as client:
            assert client.job(job.id).status() == "queued"
        with pytest.raises(redis.AuthenticationError):
            redis.Redis(port=server.port).ping()
    finally:
        server.kill()


def test_sentinels_that_do_not_reply_are_named_in_one_sentence() -> None:
    url = f"redis+sentinel://:secret@localhost:{free_port()},localhost:{free_port()}/main"
    result = CliRunner().invoke(build(), ["status", "--redis", url])
    assert (result.exit_code, result.stderr.count("\n")) == (3, 1)
    assert "no Sentinel names a primary 'main' that works (Error 111 connecting" in result.stderr
    assert "start Redis" not in result.stderr
    assert "redis.client" not in result.stderr and "secret" not in result.stderr


def test_a_redis_that_takes_no_writes_for_lack_of_replicas_is_unavailable(start: Start) -> None:
    server = start(min_replicas_to_write="1")
    with Client(server.url) as client, pytest.raises(JobError) as caught:
        client.submit(REQUEST)
    assert caught.value.code == "unavailable"
    assert "takes no writes for now: NOREPLICAS" in caught.value.message
    assert caught.value.message.endswith("as many replicas as its min-replicas-to-write says")


def test_a_short_socket_timeout_does_not_end_waiting(start: Start, tmp_path: Path) -> None:
    server = start()
    url = f"{server.url}?socket_timeout=2"
    site = Site(url, tmp_path / "results")
    job = site.submit("hello", words=100)
    worker = site.worker(delay=0.05)
    assert job.result(timeout=PATIENCE).text

    async def wait() -> str:
        async with AsyncClient(url) as client:
            return (await (await client.submit(REQUEST)).result(timeout=PATIENCE)).text

    assert asyncio.run(wait())
    assert worker.stop() == 0
    server.send(signal.SIGSTOP)
    with pytest.raises(redis.TimeoutError):
        site.redis.ping()
    server.send(signal.SIGCONT)
    site.close()
