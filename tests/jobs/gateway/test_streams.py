"""Streams of gateway processes: gone clients, killed gateways, errors and pings in the middle."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import openai
import pytest

from jobs.store.job_state import Status
from tests.jobs.gateway.conftest import GatewayProcess, Start, chat, read_events, text_in
from tests.waiting import PATIENCE, wait_until
from tests.worker.site import Site

LONG = chat(stream=True, metadata={"words": "60"})
ENDLESS = chat(stream=True, metadata={"words": "100000"})


@pytest.fixture
def slow(site: Site) -> Site:
    """A worker that gives a word each twentieth of a second."""
    site.worker(delay=0.05)
    site.wait_for_workers()
    return site


@contextmanager
def stream(gateway: GatewayProcess, body: object, **headers: str) -> Iterator[tuple[str, Iterator]]:
    """The id of the job, and its events."""
    with (
        gateway.http(**headers) as http,
        http.stream("POST", "/v1/chat/completions", json=body) as reply,
    ):
        assert reply.status_code == 200, reply.read()
        yield reply.headers["x-request-id"], read_events(reply.iter_lines())


def test_a_killed_gateway_loses_no_token_and_no_job(slow: Site, start: Start) -> None:
    gateway = start()
    begun = []
    with stream(gateway, LONG) as (job, events):
        for event in events:
            begun.append(event)
            if len(begun) == 5:
                break
        gateway.kill()
        begun += events_until_cut(events)
    last = begun[-1][0]
    assert last is not None

    again = start()
    with stream(again, LONG, **{"last-event-id": last}) as (same, events):
        rest = list(events)
    assert same == job
    assert rest[-1][1] == "[DONE]"
    answer = slow.client.job(job).result(timeout=PATIENCE).text
    assert text_in(begun + rest) == answer and len(answer.split()) == 60

    headers = {"last-event-id": last.partition(":")[2]}  # a browser's, for the path of the job
    path = f"/v1/chat/completions/chatcmpl-{job}/stream"
    with again.http(**headers) as http, http.stream("GET", path) as reply:
        assert list(read_events(reply.iter_lines())) == rest
    with again.http() as http:
        assert http.get(path.removesuffix("/stream")).json()["id"] == f"chatcmpl-{job}"


def events_until_cut(events: Iterator) -> list:
    found = []
    with suppress(Exception):  # the connection breaks in the middle of a chunk
        found.extend(events)
    return [one for one in found if one[0] is not None]


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_leaves_cancels_its_job(slow: Site, start: Start, streams: bool) -> None:
    gateway = start()
    body = {**ENDLESS, "stream": streams, "job": {"id": "mine"}}
    send(gateway, body)
    wait_until(lambda: slow.client.job("mine").status() is Status.STARTED)
    CONNECTIONS.pop().close()
    wait_until(lambda: slow.client.job("mine").status() is Status.CANCELLED)


def test_a_background_job_goes_on_without_its_client(slow: Site, start: Start) -> None:
    gateway = start()
    send(gateway, {**LONG, "background": True, "job": {"id": "mine"}})
    wait_until(lambda: slow.client.job("mine").status() is Status.STARTED)
    CONNECTIONS.pop().close()
    assert slow.client.job("mine").result(timeout=PATIENCE).text.count(" ") == 60


CONNECTIONS: list = []


def send(gateway: GatewayProcess, body: object) -> None:
    """Send a request whose reply nobody reads."""
    content = json.dumps(body).encode()
    connection = gateway.connect()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
    head += "content-type: application/json\r\n"
    connection.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
    CONNECTIONS.append(connection)


def test_an_error_in_mid_stream_is_raised_by_openais_client(slow: Site, start: Start) -> None:
    client = openai.OpenAI(base_url=f"{start().url}/v1", api_key="x", max_retries=0)
    body = chat(stream=True, metadata={"words": "5", "fail": "invalid_request"})
    seen = []
    with pytest.raises(openai.APIError, match="requested by the test") as raised:
        for chunk in client.chat.completions.create(**body):
            seen.append(chunk)
    assert len(seen) == 1
    assert raised.value.code == "invalid_request"


def test_comments_come_while_a_job_waits_in_the_queue(site: Site, start: Start) -> None:
    worker = site.worker()
    site.wait_for_workers()
    gateway = start(ping_seconds=0.1)
    with gateway.http() as http:
        assert http.get("/v1/models").json()["data"]  # seen once, so that its jobs wait
    worker.kill()
    with (
        gateway.http() as http,
        http.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as reply,
    ):
        lines = reply.iter_lines()
        assert next(lines) == ": ping"
        assert [next(lines) for _ in range(3)] == [": ping"] * 3
        site.worker()
        assert text_in(list(read_events(lines))).count(" ") == 5


def test_comments_between_events_are_no_events_of_openais_client(slow: Site, start: Start) -> None:
    client = openai.OpenAI(base_url=f"{start(ping_seconds=0.001).url}/v1", api_key="x")
    chunks = client.chat.completions.create(**LONG)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks).count(" ") == 60
    events = client.responses.create(model="fake", input="hello", stream=True)
    assert [event.type for event in events][-1] == "response.completed"


def test_a_gateway_that_stops_lets_jobs_go_on(slow: Site, start: Start) -> None:
    gateway = start(grace_seconds=1)
    with stream(gateway, LONG) as (job, events):
        begun = [next(events)]
        code = gateway.stop()
        begun += events_until_cut(events)
    assert code == 0
    assert slow.client.job(job).result(timeout=PATIENCE).text.count(" ") == 60
    assert begun[-1][1] != "[DONE]"


def test_a_request_without_a_reply_is_told_that_the_gateway_stops(slow: Site, start: Start) -> None:
    gateway = start(grace_seconds=1)
    send(gateway, chat(metadata={"words": "100"}, job={"id": "mine"}))
    wait_until(lambda: slow.client.job("mine").status() is Status.STARTED)
    assert gateway.stop() == 0
    with CONNECTIONS.pop() as connection:
        received = b""
        while part := connection.recv(65536):
            received += part
    assert received.startswith(b"HTTP/1.1 503 ") and b"x-request-id: " in received
    assert b"retry-after: 2" in received and b"the job goes on: send the request again" in received
    assert slow.client.job("mine").result(timeout=PATIENCE).text.count(" ") == 100
