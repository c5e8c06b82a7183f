"""Streams of responses: killed gateways and workers, gone clients, and runs in the background."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import openai
import pytest

from jobs import keys
from jobs.store.job_state import Status
from jobs.testing import Answer, FakeWorker
from tests.jobs.gateway.conftest import GatewayProcess, Start, read_events
from tests.jobs.gateway.in_process import send
from tests.jobs.gateway.response_types import events_of, response_of, text_of
from tests.jobs.gateway.test_main_path import client_of
from tests.waiting import PATIENCE, wait_until
from tests.worker.site import Site

PATH = "/v1/responses"
LONG: dict[str, Any] = {"model": "fake", "input": "hello", "metadata": {"words": "60"}}
ENDLESS: dict[str, Any] = {**LONG, "metadata": {"words": "100000"}}


@pytest.fixture
def slow(site: Site) -> Site:
    """A worker that gives a word each twentieth of a second."""
    site.worker(delay=0.05)
    site.wait_for_workers()
    return site


@contextmanager
def stream(gateway: GatewayProcess, body: dict[str, Any]) -> Iterator[tuple[str, Iterator[Any]]]:
    """The id of the job, and its events in JSON."""
    with gateway.http() as http, http.stream("POST", PATH, json={**body, "stream": True}) as reply:
        assert reply.status_code == 200, reply.read()
        events = (json.loads(data) for _, data in read_events(reply.iter_lines()))
        yield reply.headers["x-request-id"], events


def read_until_delta(events: Iterator[Any], count: int) -> list[Any]:
    """The events up to so many parts of the text."""
    found = []
    for event in events:
        found.append(event)
        count -= event["type"] == "response.output_text.delta"
        if count == 0:
            break
    return found


def test_a_killed_gateway_loses_no_event(slow: Site, start: Start) -> None:
    gateway = start()
    with stream(gateway, LONG) as (job, events):
        begun = read_until_delta(events, 3)
        gateway.kill()
        with suppress(Exception):  # the connection breaks in the middle of a chunk
            begun += events
    last = begun[-1]["sequence_number"]

    client = client_of(start().url)
    rest = client.responses.retrieve(f"resp_{job}", stream=True, starting_after=last)
    whole = events_of([*begun, *(one.to_dict() for one in rest)])
    assert whole[-1].type == "response.completed"
    answer = slow.client.job(job).result(timeout=PATIENCE).text
    assert text_of(whole) == answer == whole[-1].response.output_text
    assert len(answer.split()) == 60
    again = list(client.responses.retrieve(f"resp_{job}", stream=True))
    assert events_of(one.to_dict() for one in again) == whole
    assert client.responses.retrieve(f"resp_{job}").to_dict() == whole[-1].response.to_dict()


def test_a_killed_worker_changes_no_event(site: Site, start: Start) -> None:
    worker = site.worker(delay=0.05, lease_seconds=0.6)
    site.wait_for_workers()
    gateway = start()
    with stream(gateway, LONG) as (job, events):
        begun = read_until_delta(events, 10)
        worker.kill()
        site.worker(lease_seconds=0.6)
        begun += events
    whole = events_of(begun)
    assert whole[-1].type == "response.completed"
    assert text_of(whole) == whole[-1].response.output_text
    assert len(text_of(whole).split()) == 60
    later = client_of(gateway.url).responses.retrieve(f"resp_{job}", stream=True)
    assert events_of(one.to_dict() for one in later) == whole


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_leaves_cancels_its_response(slow: Site, start: Start, streams: bool) -> None:
    gateway = start()
    with leaving(gateway, {**ENDLESS, "stream": streams, "job": {"id": "mine"}}):
        wait_until(lambda: slow.client.job("mine").status() is Status.STARTED)
    wait_until(lambda: slow.client.job("mine").status() is Status.CANCELLED)
    response = client_of(gateway.url).responses.retrieve("resp_mine")
    assert response.status == "cancelled"


def test_a_response_in_the_background_goes_on_without_its_client(slow: Site, start: Start) -> None:
    gateway = start()
    with leaving(gateway, {**LONG, "stream": True, "background": True, "job": {"id": "mine"}}):
        wait_until(lambda: slow.client.job("mine").status() is Status.STARTED)
    assert slow.client.job("mine").result(timeout=PATIENCE).text.count(" ") == 60
    events = list(client_of(gateway.url).responses.retrieve("resp_mine", stream=True))
    found = [one.type for one in events_of(one.to_dict() for one in events)]
    assert found[:3] == ["response.created", "response.queued", "response.in_progress"]
    assert found[-1] == "response.completed"


@contextmanager
def leaving(gateway: GatewayProcess, body: dict[str, Any]) -> Iterator[None]:
    """A request whose reply nobody reads, until the connection is closed at the end."""
    content = json.dumps(body).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with gateway.connect() as connection:
        connection.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        yield


def test_a_response_in_the_background_is_polled_and_cancelled(slow: Site, start: Start) -> None:
    client = client_of(start().url)
    response = client.responses.create(**ENDLESS, background=True)
    response_of(response.to_dict())
    assert (response.status, response.output) == ("queued", [])

    def status() -> str | None:
        return client.responses.retrieve(response.id).status

    wait_until(lambda: status() == "in_progress")
    cancelled = client.responses.cancel(response.id)
    assert cancelled.status == status() == "cancelled"
    assert client.responses.cancel(response.id) == cancelled
    last = list(client.responses.retrieve(response.id, stream=True))[-1]
    assert (last.type, last.response) == ("response.failed", cancelled)


def test_a_response_that_runs_is_cancelled_and_deleted(slow: Site, start: Start) -> None:
    client = client_of(start().url)
    response = client.responses.create(**ENDLESS, background=True)
    job = response.id.removeprefix("resp_")
    wait_until(lambda: slow.client.job(job).status() is Status.STARTED)
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
    assert slow.client.job(job).status() is Status.UNKNOWN
    assert not slow.redis.exists(keys.log(job), f"rq:job:{job}", f"rq:results:{job}")


def test_a_full_redis_stores_nothing(slow: Site, start: Start) -> None:
    with start().http() as http:
        with slow.settings(maxmemory="1"):
            full = http.post(PATH, json=LONG)
        assert (full.status_code, full.json()["error"]["code"]) == (429, "queue_full")
        assert not slow.redis.keys("chatjobs:*response*")


def test_a_stream_that_cannot_go_on_says_so() -> None:
    worker = FakeWorker(Answer("x", delay=float("inf")))
    body = {"model": "any", "input": "x", "background": True, "job": {"id": "mine"}}
    send(worker, "POST", PATH, json=body)
    worker.client().redis.xadd(keys.log("mine"), {"d": "[]"}, "1-1")
    reply = send(worker, "GET", f"{PATH}/resp_mine?stream=true")
    *_, last = (json.loads(line[6:]) for line in reply.text.splitlines() if line[:6] == "data: ")
    events_of([last], last["sequence_number"])
    assert (last["type"], last["code"], last["error"]["code"]) == ("error", "internal", "internal")
    assert "another program has written" in last["message"]
    assert send(worker, "GET", f"{PATH}/resp_mine").json()["status"] == "in_progress"
