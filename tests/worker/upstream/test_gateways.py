"""Gateways as upstreams: of other queues, and of the same ones, which would be a loop."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest

from jobs import Client, JobError
from jobs.api.via import HEADER
from jobs.embedded import EmbeddedRedis
from jobs.store.queue_id import read_queue_id
from tests.jobs.gateway.conftest import GatewayProcess
from tests.waiting import PATIENCE
from tests.worker.site import Site
from tests.worker.upstream.conftest import Burst
from tests.worker.upstream.test_work import Worker

Serve = Callable[[Site], str]
Work = Callable[..., Worker]


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Site]:
    """Another Redis, with results of its own."""
    with EmbeddedRedis(port=0) as server:
        site = Site(server.url, tmp_path / "other")
        yield site
        site.close()


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts the gateway of a site; returns its base URL."""
    started: list[GatewayProcess] = []

    def serve(site: Site) -> str:
        started.append(GatewayProcess(site.url))
        return f"{started[-1].url}/v1"

    yield serve
    for one in started:
        one.kill()


@pytest.fixture
def work() -> Iterator[Work]:
    """Starts `chatjobs work --upstream` for the model `fake` of a site."""
    started: list[Worker] = []

    def work(site: Site, upstream: str) -> Worker:
        started.append(Worker(site, "--upstream", upstream, "--model", "fake"))
        return started[-1]

    yield work
    for one in started:
        if one.process.poll() is None:
            one.end(signal.SIGKILL)


def number_of_jobs(site: Site) -> int:
    return len([key for key in site.redis.scan_iter("rq:job:*") if key.count(b":") == 2])


def test_a_worker_does_not_start_with_the_gateway_of_its_own_queue(
    site: Site, serve: Serve, work: Work
) -> None:
    site.worker()
    site.wait_for_workers()
    url = serve(site)
    worker = work(site, url)
    assert worker.process.wait(PATIENCE) != 0
    worker._reader.join(PATIENCE)
    said = " ".join(worker.output.split())
    assert f"the upstream {url} answers 400: the request is from the queue of this gateway" in said
    assert "give its --upstream the server that has the model" in said


def test_a_job_that_comes_back_through_another_redis_is_refused_there(
    site: Site, other: Site, serve: Serve, work: Work
) -> None:
    first, second = serve(site), serve(other)
    real = other.worker()  # the model has to be there when the first worker starts
    other.wait_for_workers()
    work(site, second).says(" serves fake")
    work(other, first).says(" serves fake")
    real.stop()
    job = site.submit()
    with pytest.raises(JobError, match="would come back to it without end") as refused:
        job.result(timeout=PATIENCE)
    assert refused.value.code == "invalid_request"
    assert (number_of_jobs(site), number_of_jobs(other)) == (1, 1)


def test_a_job_that_has_passed_its_own_queue_is_not_sent(site: Site, burst: Burst) -> None:
    job = Client(site.url).submit(
        {
            "model": "fake",
            "messages": [{"role": "user", "content": "hello"}],
            "job": {"via": ["0" * 16, read_queue_id(site.redis)]},
        }
    )
    burst()
    with pytest.raises(JobError, match="the job is from this queue already") as refused:
        job.result(timeout=PATIENCE)
    assert refused.value.param == "job.via"


def test_the_header_of_another_queue_is_kept_and_a_wrong_one_refused(
    site: Site, serve: Serve
) -> None:
    site.worker()
    site.wait_for_workers()
    body = {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}
    with httpx2.Client(base_url=serve(site), timeout=PATIENCE) as http:
        reply = http.post("/chat/completions", json=body, headers={HEADER: "0" * 16})
        assert reply.status_code == 200
        kept = site.client.job(reply.headers["x-request-id"]).request
        assert kept.job.via == ["0" * 16]
        for value in ("", "x", ", ".join(["0" * 16] * 17)):
            refused = http.get("/models", headers={HEADER: value})
            assert refused.status_code == 400, value
            assert refused.json()["error"]["param"] == HEADER
        own = http.get("/models", headers={HEADER: read_queue_id(site.redis)})
        assert own.json()["error"]["code"] == "upstream_loop"


def test_a_value_of_another_program_is_no_id(site: Site) -> None:
    site.redis.set("chatjobs:id", "x")
    made = read_queue_id(site.redis)
    assert made != "x" and read_queue_id(site.redis) == made
    site.redis.delete("chatjobs:id")
    site.redis.rpush("chatjobs:id", "x")
    with pytest.raises(JobError, match="chatjobs:id in Redis is a list instead of a string"):
        read_queue_id(site.redis)
