"""Requests that are wrong, too large, too slow, or never read."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from jobs.client.aio import AsyncClient
from jobs.gateway import redis_waits, served
from jobs.store.job_state import Status
from tests.jobs.conftest import publish_worker
from tests.jobs.gateway.conftest import GatewayProcess, Start, chat
from tests.jobs.gateway.in_process import app_over, ask, client_of
from tests.servers import BINARIES, Server
from tests.waiting import wait_until
from tests.worker.site import Site

PATH = "/v1/chat/completions"
HEAD = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


def reply_to(gateway: GatewayProcess, *sent: bytes) -> tuple[int, dict[str, Any]]:
    """The status and the error of a reply that ends the connection."""
    with gateway.connect() as connection:
        for part in sent:
            connection.sendall(part)
        received = b""
        while part := connection.recv(65536):
            received += part
    head, _, body = received.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head.lower()
    assert b"x-request-id: " in head.lower()
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return int(head.split()[1]), error


def test_a_body_of_200_mb_is_refused_and_not_kept(site: Site, start: Start) -> None:
    gateway = start()
    with gateway.http() as http:
        headers = {"content-type": "application/json"}
        declared = http.post(PATH, content=bytes(200 * 2**20), headers=headers)
        parts = (bytes(2**20) for _ in range(200))
        undeclared = http.post(PATH, content=parts, headers=headers)
        for reply in (declared, undeclared):
            assert reply.status_code == 413
            assert reply.json()["error"]["code"] == "request_too_large"
            assert reply.headers["x-should-retry"] == "false"
        assert http.get("/health").status_code == 200


@pytest.mark.parametrize(
    "sent",
    [
        [b"GET /health HTTP/1.1\r\n", b"host: localhost"],
        [b""],
    ],
)
def test_a_head_that_does_not_come_is_answered_in_time(
    site: Site, start: Start, sent: list[bytes]
) -> None:
    status, error = reply_to(start(read_seconds=0.3), *sent)
    assert (status, error["code"]) == (408, "request_timeout")


def test_a_body_that_does_not_come_is_answered_in_time(site: Site, start: Start) -> None:
    status, error = reply_to(start(read_seconds=0.3), f"{HEAD}content-length: 9\r\n\r\n".encode())
    assert (status, error["code"]) == (408, "request_timeout")


def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_fault(
    site: Site, start: Start
) -> None:
    gateway = start()
    form = "multipart/form-data; boundary=x"
    for path, kind in ((PATH, "application/json"), ("/v1/files", form)):
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {kind}\r\n"
        with gateway.connect() as connection:
            connection.sendall(f"{head}content-length: 999\r\n\r\n--x\r\n".encode())

        def counted(path: str = path) -> bool:
            with gateway.http() as http:
                return f'{{handler="{path}",status="499"}} 1.0' in http.get("/metrics").text

        wait_until(counted)
    assert gateway.stop() == 0
    assert "Traceback" not in gateway.output


def test_what_is_no_http_is_answered_in_json(site: Site, start: Start) -> None:
    status, error = reply_to(start(), b"\x16\x03\x01 what\r\n\r\n")
    assert (status, error["code"]) == (400, "invalid_http")


def test_connections_above_the_limit_are_refused(site: Site, start: Start) -> None:
    gateway = start("--max-connections", "2")
    with gateway.connect(), gateway.connect():
        status, error = reply_to(gateway)
        assert (status, error["code"]) == (503, "unavailable")

    def works() -> bool:
        with gateway.http() as http:
            return http.get("/health").status_code == 200

    wait_until(works)


def test_a_stream_that_is_never_read_ends(site: Site, start: Start) -> None:
    site.worker()
    site.wait_for_workers()
    gateway = start(write_seconds=0.6)
    body = chat(stream=True, metadata={"words": "10000000"}, n=8, job={"id": "mine"})
    content = json.dumps(body).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", gateway.port))
        connection.sendall(f"{HEAD}content-length: {len(content)}\r\n\r\n".encode() + content)
        wait_until(lambda: site.client.job("mine").status() is Status.CANCELLED)


def test_a_full_queue_is_said(start: Start, site: Site) -> None:
    site.worker()
    site.wait_for_workers()
    with start().http() as http:
        with site.settings(maxmemory="1"):
            full = http.post(PATH, json=chat())
        assert (full.status_code, full.json()["error"]["code"]) == (429, "queue_full")
        assert full.headers["retry-after"] == "2"
        assert http.post(PATH, json=chat()).status_code == 200


def test_redis_that_is_away_is_said_and_comes_back(tmp_path: Path) -> None:
    server = Server(BINARIES[0], tmp_path).start()
    site = Site(server.url, tmp_path / "results")
    gateway = GatewayProcess(server.url)
    try:
        site.worker()
        site.wait_for_workers()
        with gateway.http() as http:
            assert http.post(PATH, json=chat()).status_code == 200
            server.kill()
            for reply in (http.post(PATH, json=chat()), http.get("/health")):
                assert (reply.status_code, reply.json()["error"]["code"]) == (503, "unavailable")
                assert "queue can't be reached" in reply.text
                assert reply.headers["retry-after"] == "2"
            server.start()
            wait_until(lambda: http.get("/health").status_code == 200)
            assert http.post(PATH, json=chat()).status_code == 200
    finally:
        gateway.kill()
        site.close()
        server.kill()


def test_redis_that_hangs_is_said_in_time(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connections to it stay open, and nothing else ends a wait for a reply."""
    monkeypatch.setattr(redis_waits, "HANG_SECONDS", 0.5)
    monkeypatch.setattr(served, "READ_SECONDS", 3600.0)  # the models are known
    publish_worker(site.client, "any")
    url = f"{site.url}{'&' if '?' in site.url else '?'}socket_timeout=3600"

    async def main() -> None:
        async with app_over(lambda: AsyncClient(url)) as app, client_of(app) as http:
            body = {"model": "any", "input": "hello", "background": True}
            id = (await http.post("/v1/responses", json=body)).json()["id"]
            named: dict[str, Any] = {**chat(), "model": "any", "job": {"id": "named"}}
            response = {"model": "any", "input": "y"}
            asked: list[tuple[str, str, Any]] = [
                ("GET", "/health", None),
                ("GET", "/v1/chat/completions/" + id.removeprefix("resp_"), None),
                ("GET", "/v1/responses/" + id, None),
                ("DELETE", "/v1/responses/" + id, None),
                ("POST", "/v1/responses/" + id + "/cancel", None),
                ("POST", "/v1/responses", response),
                ("POST", "/v1/responses", {**response, "previous_response_id": id}),
                ("POST", PATH, named),
                ("POST", PATH, {**chat(), "model": "any"}),
                ("POST", "/v1/completions", {"model": "any", "prompt": ["x", "y"]}),
            ]
            with site.paused_server():
                for method, path, content in asked:
                    reply = await http.request(method, path, json=content)
                    error = reply.json()["error"]
                    assert (path, reply.status_code, error["code"]) == (path, 503, "unavailable")
                    assert reply.headers["retry-after"] == "2"

            def states() -> list[str]:
                jobs = [key.decode().removeprefix("rq:job:") for key in site.redis.keys("rq:job:*")]
                return sorted(site.client.job(job).status() for job in jobs)

            # What was on its way to Redis is withdrawn, but for the job that its client has named.

            withdrawn = ["cancelled"] * 3 + ["queued"] * 2
            await asyncio.to_thread(wait_until, lambda: states() == withdrawn)
            assert site.client.job("named").status() is Status.QUEUED

    asyncio.run(main())


def test_models_of_a_redis_that_hangs_are_no_unknown_ones(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_waits, "HANG_SECONDS", 0.5)
    with site.paused_server():
        for path in ("/v1/models", "/tokenizer_info"):
            reply = ask(lambda: AsyncClient(site.url), "GET", path)
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "unavailable")
            assert reply.headers["retry-after"] == "2"
