"""Gateways as upstreams: of other queues, and of the same ones, which would be a loop."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from jobs import ChatRequest, Client, JobError
from jobs.api.via import HEADER
from jobs.embedded import EmbeddedRedis
from jobs.store.queue_id import read_queue_id
from tests.jobs.gateway.conftest import GatewayProcess
from tests.waiting import PATIENCE, wait_until
from tests.worker.checkpoints import make_checkpoint
from tests.worker.site import Site
from tests.worker.sources import read_tokenizer
from tests.worker.upstream.conftest import Burst
from tests.worker.upstream.fake_server import Exchange, FakeServer
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

    def work(site: Site, upstream: str, model: str = "fake") -> Worker:
        started.append(Worker(site, "--upstream", upstream, "--model", model))
        return started[-1]

    yield work
    for one in started:
        if one.process.poll() is None:
            one.end(signal.SIGKILL)


Chain = Callable[..., Worker]


@pytest.fixture
def chain(site: Site, other: Site, serve: Serve, work: Work) -> Chain:
    """Has the jobs of `site` for `fake` run by a worker of `other`, behind its gateway."""

    def chain(**options: Any) -> Worker:
        other.worker(**options)
        other.wait_for_workers()
        worker = work(site, serve(other), *(["fake=demo"] if options.get("real") else []))
        worker.says(" serves fake")
        return worker

    return chain


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


def ask(content: str = "What is 17 + 25?", model: str = "fake", **fields: Any) -> ChatRequest:
    messages = [{"role": "user", "content": content}]
    return ChatRequest(**{"model": model, "messages": messages, "temperature": 0, **fields})


def test_answers_streams_and_log_probabilities_are_those_of_the_other_queue(
    site: Site, other: Site, chain: Chain
) -> None:
    chain(real=True, models=["demo"])
    fields: Any = {"logprobs": True, "top_logprobs": 2}
    ours = site.client.submit(ask(**fields))
    theirs = other.client.submit(ask(model="demo", **fields))
    here, there = (job.result(timeout=PATIENCE) for job in (ours, theirs))
    assert here.text == "42"
    assert here.choices[0].message == there.choices[0].message
    mine, its = here.choices[0].logprobs, there.choices[0].logprobs
    assert mine and its and mine.content and its.content
    assert mine.content[0] == its.content[0]
    assert here.usage and there.usage
    assert here.usage.total_tokens == there.usage.total_tokens
    streamed = site.client.submit(ask(stream=True))
    assert "".join(chunk.text for chunk in streamed.stream(timeout=PATIENCE)) == "42"
    both = site.client.submit(ask(n=2)).result(timeout=PATIENCE)
    assert [choice.message.content for choice in both.choices] == ["42", "42"]


def test_tool_calls_keep_their_names_arguments_and_ids(
    site: Site, other: Site, serve: Serve, work: Work, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path / "m", num_hidden_layers=1)
    answer = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'
    script = [read_tokenizer(folder).encode(answer)]
    other.worker(real=True, models=[str(folder)], script=script)
    other.wait_for_workers()
    work(site, serve(other), "fake=m").says(" serves fake")
    tools = [{"type": "function", "function": {"name": "add"}}]
    job = site.client.submit(ask(tools=tools, max_tokens=200))
    choice = job.result(timeout=PATIENCE).choices[0]
    assert choice.message.tool_calls
    (call,) = choice.message.tool_calls
    assert call.function.name == "add"
    assert json.loads(call.function.arguments) == {"a": 1, "b": [2]}
    assert choice.finish_reason == "tool_calls"
    (row,) = rows_of(other)
    assert call.id == row["tool_calls"][0]["id"]


def rows_of(other: Site) -> list[dict[str, Any]]:
    wait_until(lambda: len(other.rows()) > 0)
    return other.rows()


def test_a_job_that_is_cancelled_is_cancelled_in_the_other_queue(
    site: Site, other: Site, chain: Chain
) -> None:
    chain(delay=0.02)
    job = site.submit(" ".join(["word"] * 3000))
    next(iter(job.stream(timeout=PATIENCE)))
    assert job.cancel()
    wait_until(lambda: job.status().over)
    (row,) = rows_of(other)
    assert row["status"] == "cancelled"


def test_errors_keep_their_codes(site: Site, chain: Chain) -> None:
    chain(real=True, models=["demo"])
    long, wrong = ask("1 + " * 5000), ask(allowed_token_ids=[10**6])
    for request, code in ((long, "context_length_exceeded"), (wrong, "invalid_request")):
        with pytest.raises(JobError) as failed:
            site.client.submit(request).result(timeout=PATIENCE)
        assert failed.value.code == code, failed.value
    assert site.client.submit(ask()).result(timeout=PATIENCE).text == "42"


@pytest.mark.parametrize("code", ["out_of_memory", "worker_lost", "timeout", "cancelled"])
def test_a_failure_after_all_retries_of_the_other_queue_is_not_waited_for(
    site: Site, server: FakeServer, burst: Burst, code: str
) -> None:
    error = {"error": {"message": "it failed", "type": "server_error", "code": code}}

    def in_stream(exchange: Exchange) -> None:
        exchange.begin()
        exchange.chunk(content="half an ")
        exchange.event(error)
        exchange.raw(b"")

    def at_once(exchange: Exchange) -> None:
        exchange.respond(503, error, **{"x_should_retry": "false"})

    for answer in (in_stream, at_once):
        server.answer = answer
        job = site.submit(retries=0)
        burst()
        with pytest.raises(JobError, match="it failed") as failed:
            job.result(timeout=PATIENCE)
        assert failed.value.code == code
    assert len(server.bodies) == 2
