"""The HTTP server answers whatever other clients and pages do."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from http import HTTPStatus

import pytest

from jobs import JobError
from worker.monitoring.server import MAX_CONNECTIONS, HttpServer, Page, Response

LIMIT = 10.0  # seconds that a reply may take on a busy machine


@pytest.fixture
def hold() -> Iterator[threading.Event]:
    """The page /slow answers when it is set."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def server(hold: threading.Event) -> Iterator[HttpServer]:
    def slow(accept: str) -> Response:
        hold.wait(LIMIT)
        return Response.of(HTTPStatus.OK, f"accept {accept.strip()}")

    def broken(accept: str) -> Response:
        raise ValueError("secret")

    pages = {
        "/quick": Page(lambda _: Response.of(HTTPStatus.OK, "quick")),
        "/slow": Page(slow, waits=True),
        "/broken": Page(broken),
    }
    with closing(HttpServer("127.0.0.1", 0, pages)) as server:
        server.start()
        yield server


def port_of(server: HttpServer) -> int:
    return int(server.address.rpartition(":")[2])


def get(server: HttpServer, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
    with closing(http.client.HTTPConnection("127.0.0.1", port_of(server), LIMIT)) as connection:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read().decode()


def test_what_is_no_request_for_a_page_is_refused(server: HttpServer) -> None:
    assert get(server, "/quick?a=b") == (200, "quick\n")
    assert get(server, "/quick", "HEAD") == (200, "")
    assert get(server, "/nothing") == (404, "pages: /quick, /slow, /broken\n")
    assert get(server, "/quick", "POST") == (405, "GET or HEAD only\n")
    assert get(server, "/quick", X="a" * 10_000)[0] == 431
    assert get(server, "/broken") == (500, "see the log of the worker\n")
    with socket.create_connection(("127.0.0.1", port_of(server)), LIMIT) as raw:
        raw.sendall(b"\x16\x03\x01 TLS\r\n\r\n")
        assert raw.recv(100).startswith(b"HTTP/1.1 400 ")


def test_a_page_that_waits_delays_no_probe(server: HttpServer, hold: threading.Event) -> None:
    found: list[tuple[int, str]] = []
    asking = threading.Thread(target=lambda: found.append(get(server, "/slow", accept="text/a")))
    asking.start()
    assert get(server, "/quick") == (200, "quick\n")
    assert not found
    hold.set()
    asking.join(LIMIT)
    assert found == [(200, "accept text/a\n")]


def test_clients_that_only_connect_take_a_few_descriptors_and_delay_nobody(
    server: HttpServer,
) -> None:
    with ExitStack() as stack:
        idle = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port_of(server)), LIMIT))
            for _ in range(4 * MAX_CONNECTIONS)
        ]
        assert get(server, "/quick") == (200, "quick\n")
        closed = 0
        for one in idle[: 3 * MAX_CONNECTIONS]:
            try:
                closed += one.recv(1) == b""
            except ConnectionResetError:
                closed += 1
        assert closed == 3 * MAX_CONNECTIONS


def test_a_port_that_is_taken_is_one_sentence(server: HttpServer) -> None:
    with pytest.raises(JobError) as caught:
        HttpServer("127.0.0.1", port_of(server), {})
    assert caught.value.code == "unavailable"
    assert caught.value.message == (
        f"can't listen on {server.address}: Address already in use; give --http another port or "
        "address"
    )
    with pytest.raises(JobError, match=r"can't listen on no\.host\.invalid:1: "):
        HttpServer("no.host.invalid", 1, {})


def test_after_close_the_port_is_free(server: HttpServer) -> None:
    port = port_of(server)
    with socket.create_connection(("127.0.0.1", port), LIMIT):
        server.close()
        HttpServer("127.0.0.1", port, {}).close()
