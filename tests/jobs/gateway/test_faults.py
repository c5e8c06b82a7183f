"""Faults around a gateway: a killed Redis, clients that are as slow as can be, many connections."""

from __future__ import annotations

import json
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from jobs.store.job_state import Status
from tests.jobs.gateway.conftest import GatewayProcess, Start, chat, read_events, text_in
from tests.jobs.gateway.test_bad_input import HEAD, PATH
from tests.servers import BINARIES, Server
from tests.waiting import PATIENCE, wait_until
from tests.worker.site import Site

LONG = chat(stream=True, metadata={"words": "60"})
Events = list[tuple[str | None, str]]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A Redis that keeps what it has acknowledged when it is killed."""
    options = {"appendonly": "yes", "appendfsync": "always"}
    server = Server(BINARIES[0], tmp_path / "redis", **options).start()
    yield server
    server.kill()


@pytest.fixture
def beside(server: Server, tmp_path: Path) -> Iterator[Site]:
    """A worker of this Redis that gives a word each twentieth of a second."""
    site = Site(server.url, tmp_path / "results")
    site.worker(delay=0.05, lease_seconds=12)
    site.wait_for_workers()
    yield site
    site.close()


def fault_of(events: Events) -> Any:
    """The error that ends a stream; None if it ended by itself."""
    last = events[-1][1]
    error = None if last == "[DONE]" else json.loads(last)["error"]
    others = [json.loads(data) for _, data in events[:-1]]
    assert not any("error" in one for one in others)
    assert error is None or set(error) == {"message", "type", "param", "code"}
    return error


def finish(gateway: GatewayProcess, job: str, events: Events) -> Events:
    """All events of a stream, resumed after each error."""
    while fault_of(events) is not None:
        begun = events[:-1]
        with (
            gateway.http(**{"last-event-id": begun[-1][0] or ""}) as http,
            http.stream("POST", PATH, json=LONG) as reply,
        ):
            if reply.status_code == 200:
                assert reply.headers["x-request-id"] == job
                events = begun + list(read_events(reply.iter_lines()))
            else:
                assert "error" in json.loads(reply.read())
    return events


@pytest.mark.parametrize("returns", [True, False], ids=["at once", "after the error"])
def test_a_killed_redis_leaves_the_rest_or_an_error_and_streams_go_on(
    server: Server, beside: Site, returns: bool
) -> None:
    gateway = GatewayProcess(server.url)
    try:
        events: Events = []
        with gateway.http() as http, http.stream("POST", PATH, json=LONG) as reply:
            job = reply.headers["x-request-id"]
            coming = read_events(reply.iter_lines())
            for event in coming:
                events.append(event)
                if len(events) == 5:
                    server.kill()
                    if returns:
                        server.start()
        assert returns or fault_of(events)["code"] == "unavailable"
        if not returns:
            server.start()
        events = finish(gateway, job, events)
        assert len({id for id, _ in events[:-1]}) == len(events) - 1
        answer = beside.client.job(job).result(timeout=PATIENCE).text
        assert text_in(events) == answer and len(answer.split()) == 60
    finally:
        gateway.kill()


def test_a_client_that_sends_a_byte_now_and_then_is_ended_in_time(site: Site, start: Start) -> None:
    gateway = start(read_seconds=1.0)
    for sent in (b"GET /health HTTP/1.1\r\nx: ", f"{HEAD}content-length: 999\r\n\r\n".encode()):
        with gateway.connect() as connection:
            connection.sendall(sent)
            ended = threading.Event()

            def drip(connection: socket.socket = connection, ended: Any = ended) -> None:
                while not ended.wait(0.05):
                    try:
                        connection.sendall(b"x")
                    except OSError:
                        return

            thread = threading.Thread(target=drip)
            thread.start()
            received = b""
            try:
                while part := connection.recv(65536):
                    received += part
            except ConnectionResetError:  # bytes came after the end
                pass
            finally:
                ended.set()
                thread.join()
            assert received.startswith(b"HTTP/1.1 408")


def test_a_client_that_reads_a_byte_now_and_then_is_cut_off(site: Site, start: Start) -> None:
    site.worker(lease_seconds=12)
    site.wait_for_workers()
    gateway = start(write_seconds=0.6)
    body = chat(stream=True, metadata={"words": "10000000"}, n=8, job={"id": "mine"})
    content = json.dumps(body).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", gateway.port))
        connection.sendall(f"{HEAD}content-length: {len(content)}\r\n\r\n".encode() + content)
        connection.settimeout(PATIENCE)

        def cancelled() -> bool:
            with suppress(ConnectionResetError):
                connection.recv(1)
            return site.client.job("mine").status() is Status.CANCELLED

        wait_until(cancelled)
    with gateway.http() as http:
        assert http.get("/health").status_code == 200


def test_thousands_of_idle_connections_delay_nobody(site: Site, start: Start) -> None:
    """10,000 of them, if the system allows as many files to this process."""
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    count = min(10_000, most // 2 - 200)
    try:
        gateway = start(max_connections=count + 10, read_seconds=600.0)
        with ExitStack() as opened:
            for _ in range(count):
                connection = opened.enter_context(gateway.connect())
                connection.sendall(b"GET /health HTTP/1.1\r\n")
            with gateway.http() as http:
                assert http.get("/health").status_code == 200
        with gateway.http() as http:
            assert http.get("/health").status_code == 200
        assert gateway.stop() == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, most))


def test_the_end_is_logged_once(site: Site, start: Start) -> None:
    """As soon as the gateway says that it serves, it can be stopped."""
    gateway = start(grace_seconds=25)
    assert gateway.stop() == 0
    assert gateway.output.count("stopping: replies that are open: 0, with 25 s to end") == 1
