"""Redis is away for longer than a lease: no worker has died, and none is declared dead."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import redis
from click.testing import CliRunner
from rq import Queue
from rq.serializers import JSONSerializer

from jobs import ChatCompletion, Client, JobError, keys
from jobs.cli import build
from jobs.embedded import EmbeddedRedis
from jobs.operations import CHAT
from jobs.store.worker_status import read_statuses
from tests.worker.site import PATIENCE, Site, WorkerProcess, wait_until

LEASE_SECONDS = 2.5  # longer than a busy machine stops a worker
OUTAGE_SECONDS = 6.0  # more than two leases


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path / "redis", append_only=True) as server:
        yield server


@pytest.fixture
def site(server: EmbeddedRedis, tmp_path: Path) -> Iterator[Site]:
    site = Site(server.url, tmp_path / "results")
    yield site
    site.close()


def restart(server: EmbeddedRedis) -> None:
    server.stop()
    time.sleep(OUTAGE_SECONDS)
    server.start()


@pytest.mark.parametrize("kind", ["restart", "silence", "no writes"])
def test_an_outage_is_no_death(site: Site, server: EmbeddedRedis, kind: str) -> None:
    jobs = site.submit_many([f"q{i}" for i in range(6)], words=100_000)
    options = {"delay": 0.02, "max_batch": 2, "lease_seconds": LEASE_SECONDS}
    workers = [site.worker(**options) for _ in range(3)]
    wait_until(lambda: all(job.status().value == "started" for job in jobs))
    for _ in range(2):
        if kind == "restart":
            restart(server)
        elif kind == "no writes":
            with site.settings(**{"min-replicas-to-write": "1"}):
                time.sleep(OUTAGE_SECONDS)
        else:
            with site.paused_server():
                time.sleep(OUTAGE_SECONDS)
        wait_until(lambda: all("chatjobs_attempt" in site.hash(job) for job in jobs))
        time.sleep(OUTAGE_SECONDS)  # the workers would return each other's jobs by now
    assert {site.hash(job)["chatjobs_attempt"] for job in jobs} == {"1"}
    assert {site.hash(job).get("chatjobs_lost") for job in jobs} == {None}
    for job in jobs:
        job.cancel()
    wait_until(lambda: all(job.status().over for job in jobs))
    for worker in workers:
        assert worker.stop() == 0
        assert "does not renew its lease" not in worker.output
        assert kind == "silence" or "Redis fails (" in worker.output
        assert "Traceback" not in worker.output


@contextmanager
def busy_script(site: Site, server: EmbeddedRedis) -> Iterator[None]:
    """Another program's script blocks Redis, which refuses all commands meanwhile."""
    with site.settings(**{"busy-reply-threshold": "100"}):
        blocked = threading.Thread(target=_run_for_ever, args=(server.url,))
        blocked.start()
        with redis.Redis.from_url(server.url) as other:
            wait_until(lambda: _is_refused(other))
            try:
                yield
            finally:
                other.script_kill()
                blocked.join()


def _run_for_ever(url: str) -> None:
    with redis.Redis.from_url(url) as other, suppress(redis.ResponseError):
        other.eval("while true do end", 0)


def _is_refused(client: redis.Redis) -> bool:
    try:
        client.ping()
    except redis.ResponseError as error:
        return str(error).startswith("BUSY ")
    return False


def test_a_script_of_another_program_that_blocks_redis_is_an_outage(
    site: Site, server: EmbeddedRedis
) -> None:
    """It fails no job, and no wait for one."""
    worker = site.worker(delay=0.02)
    jobs = site.submit_many(["a", "b"], words=20)
    wait_until(lambda: jobs[0].status().value == "started")
    found: list[ChatCompletion] = []
    with busy_script(site, server):
        waits = [
            threading.Thread(target=lambda one=one: found.append(one.result(timeout=PATIENCE)))
            for one in jobs
        ]
        for wait in waits:
            wait.start()
        time.sleep(3.0)
        with pytest.raises(
            JobError, match=r"Redis at .* is blocked: BUSY .*SCRIPT KILL"
        ) as failure:
            site.submit()
        assert failure.value.code == "unavailable"
    for wait in waits:
        wait.join()
    assert len(found) == 2
    assert worker.stop() == 0
    site.assert_settled(jobs)
    assert "Redis fails (BUSY " in worker.output
    assert "Traceback" not in worker.output and "claiming jobs fails" not in worker.output


@contextmanager
def outage_after_load(
    site: Site, server: EmbeddedRedis, kind: str, loaded: Path
) -> Iterator[WorkerProcess]:
    """A worker whose models are loaded when Redis goes away, or takes no writes, and which waits
    for it. Redis works again at the end of the block."""
    worker = site.worker(load_until=str(loaded))
    wait_until(lambda: site.redis.keys(keys.worker("*")) or not worker.alive)
    if kind == "away":
        server.stop()
    else:
        site.redis.config_set("min-replicas-to-write", "1")
    loaded.touch()
    wait_until(lambda: "Redis fails (" in worker.output or not worker.alive)
    time.sleep(2.0)
    yield worker
    if kind == "away":
        server.start()
    else:
        site.redis.config_set("min-replicas-to-write", "0")


@pytest.mark.parametrize("kind", ["away", "no writes"])
def test_an_outage_at_the_end_of_a_load_does_not_end_the_worker(
    site: Site, server: EmbeddedRedis, kind: str, tmp_path: Path
) -> None:
    with outage_after_load(site, server, kind, tmp_path / "loaded") as worker:
        pass
    assert site.submit().result(timeout=PATIENCE)
    assert "Redis is back" in worker.output
    assert worker.stop() == 0


@pytest.mark.parametrize(("kind", "code"), [("away", -signal.SIGTERM), ("no writes", 0)])
def test_a_signal_ends_a_worker_that_waits_for_redis_after_its_load(
    site: Site, server: EmbeddedRedis, kind: str, code: int, tmp_path: Path
) -> None:
    with outage_after_load(site, server, kind, tmp_path / "loaded") as worker:
        worker.send(signal.SIGTERM)
        assert worker.wait() == code
    assert "Traceback" not in worker.output


def test_a_death_during_an_outage_is_found(site: Site, server: EmbeddedRedis) -> None:
    job = site.submit(words=100_000)
    doomed = site.worker(delay=0.02)
    wait_until(lambda: job.status().value == "started")
    other = site.worker(models=["other"])
    site.wait_for_workers(2)
    doomed.kill()
    restart(server)
    wait_until(lambda: site.redis.llen("rq:queue:chat:fake") == 1)
    assert site.hash(job)["chatjobs_lost"] == "1"
    assert other.alive


def test_a_long_job_waits_for_its_worker_that_comes_back_later(
    site: Site, server: EmbeddedRedis
) -> None:
    options = {"lease_seconds": LEASE_SECONDS}
    site.worker(context=64, **options)
    longer = site.worker(context=512, **options)
    wait_until(lambda: len(read_statuses(site.redis).contexts("fake", CHAT.func)) == 2)
    longer.freeze()
    first = site.submit("word " * 100)
    wait_until(lambda: "chatjobs_longer" in site.hash(first))
    restart(server)  # leases and statuses have run out; only the short worker can renew its own
    second = site.submit("word " * 100)
    wait_until(lambda: "chatjobs_longer" in site.hash(second))
    longer.thaw()
    for job in (first, second):
        assert job.result(timeout=PATIENCE).choices[0].finish_reason == "stop"


def test_a_policy_that_evicts_stops_workers_and_submits(site: Site) -> None:
    worker = site.worker()
    assert site.submit("before").result(timeout=PATIENCE)
    reason = "Redis may evict keys (maxmemory-policy allkeys-lru), so jobs could be lost: set"

    def status() -> str:
        return CliRunner().invoke(build(), ["status", "--redis", site.url]).output

    with site.settings(**{"maxmemory": "1gb", "maxmemory-policy": "allkeys-lru"}):
        wait_until(lambda: f"claims no jobs: {reason}" in status())
        with (
            Client(site.url) as client,
            pytest.raises(JobError, match="jobs could be lost") as caught,
        ):
            client.submit({"model": "fake", "messages": [{"role": "user", "content": "x"}]})
        assert caught.value.code == "unavailable"
        assert reason in caught.value.message
        queue = Queue("chat:fake", connection=site.redis, serializer=JSONSerializer)
        request = {"model": "fake", "messages": [{"role": "user", "content": "x"}]}
        enqueued = site.client.job(queue.enqueue(CHAT.func, kwargs={"request": request}).id)
        _wait_for_renewal(site)
        assert enqueued.status() == "queued"
    assert enqueued.result(timeout=PATIENCE)
    assert worker.stop() == 0
    assert worker.output.count(f"not claiming jobs: {reason}") == 1
    assert "claiming jobs again" in worker.output


def _wait_for_renewal(site: Site) -> None:
    (name,) = site.redis.zrange(keys.WORKERS, 0, -1)
    before = site.redis.zscore(keys.WORKERS, name)
    wait_until(lambda: site.redis.zscore(keys.WORKERS, name) != before)
