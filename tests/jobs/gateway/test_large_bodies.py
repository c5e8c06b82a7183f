"""Requests with large bodies, which a process beside the gateway answers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from jobs.api.request import ChatRequest
from jobs.gateway import large_process
from jobs.gateway.bodies import LARGE
from jobs.gateway.settings import Settings
from jobs.store.job_state import Status
from jobs.testing import FakeWorker
from tests.jobs.gateway.conftest import GatewayProcess, Start, chat, read_events, text_in
from tests.jobs.gateway.in_process import SETTINGS
from tests.jobs.gateway.test_bad_input import HEAD, PATH
from tests.jobs.gateway.test_metrics import wait_for
from tests.waiting import PATIENCE, has_ended, wait_until
from tests.worker.site import Site

LONG = "x" * LARGE


def large(**fields: Any) -> dict[str, Any]:
    """A chat that the other process answers."""
    body = chat(**fields)
    return {**body, "messages": [{"role": "system", "content": LONG}, *body["messages"]]}


def process_of(gateway: GatewayProcess) -> int | None:
    """The other process of a gateway, once it has one."""
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
        if parent == gateway.pid and b"jobs.gateway.large_process" in words:
            return int(entry.name)
    return None


@pytest.fixture
def gateway(site: Site, start: Start) -> GatewayProcess:
    site.worker()
    site.wait_for_workers()
    return start()


def send(gateway: GatewayProcess, body: object) -> Any:
    """The connection of a request whose reply nobody reads."""
    content = json.dumps(body).encode()
    connection = gateway.connect()
    connection.sendall(f"{HEAD}content-length: {len(content)}\r\n\r\n".encode() + content)
    return connection


def test_large_requests_hold_up_no_others(gateway: GatewayProcess, site: Site) -> None:
    with gateway.http() as http:
        assert http.post(PATH, json=chat()).status_code == 200
        assert process_of(gateway) is None
        assert http.post(PATH, json=large()).status_code == 200
        other = process_of(gateway)
        assert other is not None
        os.kill(other, signal.SIGSTOP)
        with send(gateway, large(job={"id": "late"})):
            for _ in range(3):
                assert http.post(PATH, json=chat()).status_code == 200
            assert site.client.job("late").status() is Status.UNKNOWN
            os.kill(other, signal.SIGCONT)
            wait_until(lambda: site.client.job("late").status() is Status.FINISHED)


def test_replies_are_those_of_small_requests(gateway: GatewayProcess, site: Site) -> None:
    with gateway.http() as http:
        reply = http.post(PATH, json=large())
        job = reply.headers.get_list("x-request-id")
        assert [reply.json()["id"]] == [f"chatcmpl-{one}" for one in job]
        assert len(reply.headers.get_list("date")) == 1
        body = large(stream=True, metadata={"words": "20"})
        with http.stream("POST", PATH, json=body) as streamed:
            events = list(read_events(streamed.iter_lines()))
        assert events[-1][1] == "[DONE]" and len(text_in(events).split()) == 20
        seen = str(events[0][0])
        with http.stream("POST", PATH, json=body, headers={"last-event-id": seen}) as rest:
            assert list(read_events(rest.iter_lines())) == events[1:]

        completed = http.post("/v1/completions", json={"model": "fake", "prompt": [LONG, "b"]})
        assert len(completed.json()["choices"]) == 2, completed.text[:500]
        made = http.post("/v1/responses", json={"model": "fake", "input": LONG}).json()
        assert http.get("/v1/responses/" + made["id"]).json()["output"] == made["output"]
        for wrong, param in ((large(top_p=2), "top_p"), ({"model": "fake", "x": LONG}, "x")):
            error = http.post(PATH, json=wrong)
            assert (error.status_code, error.json()["error"]["param"]) == (400, param)
        headers = {"content-type": "application/json"}
        error = http.post(PATH, content="{" + LONG, headers=headers)
        assert (error.status_code, error.json()["error"]["code"]) == (400, "invalid_json")
    wait_for(gateway, "chatjobs_http_requests_total", {(PATH, "200"): 3, (PATH, "400"): 3})
    wait_for(gateway, "chatjobs_http_first_event_added_seconds_count", {(): 2})
    wait_for(gateway, "chatjobs_http_streams_open", {(): 0})


def test_the_tenant_of_a_large_request_is_that_of_its_key(
    site: Site, start: Start, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[tenants.acme]\nkeys = ["sk-1"]\n', encoding="utf-8")
    site.worker()
    site.wait_for_workers()
    gateway = start("--api-key-file", str(keys))
    with gateway.http(authorization="Bearer sk-1") as http:
        job = http.post(PATH, json=large()).headers["x-request-id"]
    assert site.client.job(job).request.job.tenant == "acme"
    with gateway.http(authorization="Bearer sk-2") as http:
        assert http.post(PATH, json=large()).status_code == 401


def test_a_process_that_dies_is_an_error_and_is_started_again(
    gateway: GatewayProcess, site: Site
) -> None:
    with gateway.http() as http:
        assert http.post(PATH, json=large()).status_code == 200
        before = process_of(gateway)
        assert before is not None
        os.kill(before, signal.SIGSTOP)
        with send(gateway, large()) as connection:
            wait_until(lambda: has_connection(before))
            os.kill(before, signal.SIGKILL)
            received = b""
            while not received.endswith(b"}}"):
                received += (part := connection.recv(65536))
                assert part, received
        assert received.startswith(b"HTTP/1.1 503 ") and b"send the request again" in received
        assert http.post(PATH, json=large()).status_code == 200
        assert process_of(gateway) not in (None, before)


def has_connection(pid: int) -> bool:
    """True once a gateway has connected to this process, which is stopped."""
    path = Path(f"/proc/{pid}/cmdline").read_text().split("\0")[4]
    sockets = Path(f"/proc/{pid}/net/unix").read_text().splitlines()
    return sum(line.endswith(f" {path}") for line in sockets) > 1  # one of them listens


def test_a_client_that_leaves_cancels_its_job_and_one_of_a_killed_gateway_goes_on(
    site: Site, start: Start
) -> None:
    site.worker(delay=0.05)
    site.wait_for_workers()
    endless = {"words": "100000"}
    gateway = start()
    connection = send(gateway, large(metadata=endless, job={"id": "left"}))
    wait_until(lambda: site.client.job("left").status() is Status.STARTED)
    connection.close()
    wait_until(lambda: site.client.job("left").status() is Status.CANCELLED)

    with send(gateway, large(metadata={"words": "200"}, job={"id": "killed"})):
        wait_until(lambda: site.client.job("killed").status() is Status.STARTED)
        orphan = process_of(gateway)
        assert orphan is not None
        gateway.kill()
        wait_until(lambda pid=orphan: has_ended(pid))  # type: ignore[misc]
    assert site.client.job("killed").result(timeout=PATIENCE).text.count(" ") == 200

    stopping = start(grace_seconds=1.0)
    with send(stopping, large(metadata={"words": "200"}, job={"id": "stopped"})):
        wait_until(lambda: site.client.job("stopped").status() is Status.STARTED)
        ending = process_of(stopping)
        assert ending is not None
        assert stopping.stop() == 0
        assert has_ended(ending)
    assert site.client.job("stopped").result(timeout=PATIENCE).text.count(" ") == 200


@pytest.mark.parametrize("is_killed", [True, False])
def test_only_a_gateway_that_lives_cancels_the_jobs_of_its_connections(
    monkeypatch: pytest.MonkeyPatch, is_killed: bool
) -> None:
    monkeypatch.setattr(large_process, "KILLED_SECONDS", 0.0)
    with FakeWorker("x") as worker:
        sent = worker.client().submit(ChatRequest.parse({**chat(), "model": "any"}))

        async def main() -> None:
            async with worker.async_client() as client:
                gateway = large_process.Beside(Settings(**SETTINGS), client)
                if is_killed:
                    monkeypatch.setattr(os, "getppid", lambda: -1)
                await gateway.cancel(client.job(sent.id))
                gateway.overview.close()

        asyncio.run(main())
        assert sent.status() is (Status.QUEUED if is_killed else Status.CANCELLED)


def test_an_open_reply_ends_before_the_gateway_does(site: Site, start: Start) -> None:
    site.worker(delay=0.05)
    site.wait_for_workers()
    gateway = start()
    body = large(stream=True, metadata={"words": "40"})
    with gateway.http() as http, http.stream("POST", PATH, json=body) as reply:
        events = read_events(reply.iter_lines())
        begun = [next(events)]
        gateway.request_stop()
        begun += events
    assert gateway.wait() == 0
    assert begun[-1][1] == "[DONE]" and len(text_in(begun).split()) == 40
