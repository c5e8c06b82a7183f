"""Replies of the application, over the fake worker."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from jobs import JobError, keys
from jobs.errors import ERROR_CODES
from jobs.gateway import served
from jobs.gateway.events import MOST_BYTES, EventStream, nothing
from jobs.gateway.failures import STATUS
from jobs.gateway.leaving import end
from jobs.gateway.served import Model, ServedModels, unknown_model
from jobs.testing import Answer, FakeWorker
from tests.jobs.gateway.conftest import read_events
from tests.jobs.gateway.in_process import app_of, client_of, send

PATH = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "any", "messages": [{"role": "user", "content": "hi"}]}


def error_of(reply: Any) -> dict[str, Any]:
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-request-id"]
    return error


def test_an_answer_has_the_id_of_its_job() -> None:
    worker = FakeWorker("Hello")
    reply = send(worker, "POST", PATH, json={**BODY, "job": {"id": "mine"}})
    assert reply.status_code == 200
    assert reply.json()["id"] == "chatcmpl-mine"
    assert reply.json()["choices"][0] == {
        "index": 0,
        "message": {"role": "assistant", "content": "Hello", "refusal": None},
        "finish_reason": "stop",
        "logprobs": None,
    }
    assert reply.headers["x-request-id"] == "mine"
    assert worker.requests[0].stream is False


def test_tokens_of_one_wake_are_one_write() -> None:
    """httpx2 gives the parts of a body as they are sent."""
    reply = send(FakeWorker("one two three"), "POST", PATH, json={**BODY, "stream": True})
    assert reply.text.endswith("\n\ndata: [DONE]\n\n")
    assert reply.text.count("data: ") == 4


def test_a_stream_is_read_no_faster_than_its_client_takes_it() -> None:
    taken = 0

    async def source() -> AsyncIterator[bytes]:
        nonlocal taken
        while taken < 1000:
            taken += 1
            yield bytes(MOST_BYTES // 4)

    async def main() -> None:
        full = asyncio.Event()

        async def deliver(message: Any) -> None:
            if message["type"] == "http.response.body":
                full.set()
                await asyncio.Event().wait()

        async def receive() -> Any:
            await asyncio.Event().wait()

        stream = EventStream(source(), 15.0, nothing)
        sending = asyncio.create_task(stream({"type": "http"}, receive, deliver))
        await full.wait()
        for _ in range(5000):
            await asyncio.sleep(0)
        await end(sending)

    asyncio.run(main())
    assert 1 <= taken <= 10  # those in the write that waits, and MOST_BYTES


def test_a_model_that_was_served_of_late_is_no_unknown_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its worker may be restarting."""
    worker = FakeWorker("x")
    monkeypatch.setattr(served, "READ_SECONDS", 0.0)

    async def main() -> list[int]:
        async with app_of(worker) as app, client_of(app) as http:
            assert len((await http.get("/v1/models")).json()["data"]) == 1
            worker.client().redis.delete(keys.worker("w1"))
            assert (await http.get("/v1/models")).json()["data"] == []
            late = await http.post(PATH, json=BODY)
            monkeypatch.setattr(served, "REMEMBER_SECONDS", 0.0)
            return [late.status_code, (await http.post(PATH, json=BODY)).status_code]

    assert asyncio.run(main()) == [200, 404]


def test_the_end_of_a_choice_comes_after_its_calls_and_both_can_be_resumed() -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
    with FakeWorker(Answer("one two", tool_calls=[call])) as worker:
        reply = send(worker, "POST", PATH, json={**BODY, "stream": True, "job": {"id": "mine"}})
        events = list(read_events(iter(reply.text.splitlines())))
        chunks = [json.loads(data)["choices"][0] for _, data in events[:-1]]
        assert [one["delta"].get("tool_calls") is not None for one in chunks[-2:]] == [True, False]
        assert [one["finish_reason"] for one in chunks[-2:]] == [None, "tool_calls"]
        for number, (id, _) in enumerate(events[:-1]):
            headers = {"last-event-id": id or ""}
            rest = send(worker, "GET", f"{PATH}/mine/stream", headers=headers)
            assert list(read_events(iter(rest.text.splitlines()))) == events[number + 1 :]


@pytest.mark.parametrize("code", ERROR_CODES)
def test_each_error_of_a_job_has_a_status_and_is_not_retried(code: Any) -> None:
    worker = FakeWorker(Answer("", error=JobError(code, "no luck")))
    reply = send(worker, "POST", PATH, json={**BODY, "job": {"retries": 0}})
    assert (reply.status_code, error_of(reply)["code"]) == (STATUS[code], code)
    assert (reply.headers.get("x-should-retry") == "false") is (code != "unavailable")


@pytest.mark.parametrize(
    ("method", "path", "call", "status", "code", "param"),
    [
        ("GET", "/v1/nothing", {}, 404, "unknown_url", None),
        ("GET", "/v1/chat/completions/", {}, 404, "unknown_url", None),
        ("DELETE", "/v1/models", {}, 405, "method_not_allowed", None),
        ("GET", "/v1/models/none", {}, 404, "model_not_found", "model"),
        ("GET", f"{PATH}/none", {}, 404, "not_found", "id"),
        ("GET", f"{PATH}/a%20b/stream", {}, 404, "not_found", "id"),
        ("POST", PATH, {"content": b"{}"}, 415, "unsupported_media_type", None),
        ("POST", PATH, {"data": {"a": "b"}}, 415, "unsupported_media_type", None),
        ("POST", PATH, {"json": []}, 400, "invalid_request", None),
        ("POST", PATH, {"json": {}}, 400, "invalid_request", "model"),
        ("POST", PATH, {"json": {**BODY, "model": "other"}}, 404, "model_not_found", "model"),
        ("POST", PATH, {"json": {**BODY, "n": 0}}, 400, "invalid_request", "n"),
        ("POST", PATH, {"json": {**BODY, "background": 1}}, 400, "invalid_request", "background"),
        (
            "POST",
            PATH,
            {"json": {**BODY, "stream": True}, "headers": {"last-event-id": "1-1"}},
            400,
            "invalid_request",
            "Last-Event-ID",
        ),
    ],
)
def test_wrong_requests_are_refused_in_openais_form(
    method: str, path: str, call: dict[str, Any], status: int, code: str, param: str | None
) -> None:
    reply = send(FakeWorker("x"), method, path, **call)
    error = error_of(reply)
    assert (reply.status_code, error["code"], error["param"]) == (status, code, param)


def test_a_method_that_no_route_takes_is_told_those_of_all_routes_of_the_path() -> None:
    reply = send(FakeWorker("x"), "OPTIONS", "/v1/files")
    assert (reply.status_code, reply.headers["allow"]) == (405, "GET, HEAD, POST")
    assert error_of(reply)["message"] == "OPTIONS /v1/files: this route takes GET, HEAD, POST"


@pytest.mark.parametrize("text", [b"{", b"\xff", b"[" * 100_000, b'{"a": 1}x'])
def test_what_is_no_json_is_refused(text: bytes) -> None:
    headers = {"content-type": "application/json; charset=utf-8"}
    reply = send(FakeWorker("x"), "POST", PATH, content=text, headers=headers)
    assert (reply.status_code, error_of(reply)["code"]) == (400, "invalid_json")


def test_pages_of_other_origins_may_call_only_if_they_are_named() -> None:
    headers = {"origin": "https://app.example", "access-control-request-method": "POST"}
    plain = send(FakeWorker("x"), "OPTIONS", PATH, headers=headers)
    assert plain.status_code == 405 and "access-control-allow-origin" not in plain.headers
    named = send(
        FakeWorker("x"),
        "OPTIONS",
        PATH,
        headers=headers,
        settings={"cors_origins": ("https://app.example",)},
    )
    assert named.headers["access-control-allow-origin"] == "https://app.example"


def test_a_long_name_is_not_given_back() -> None:
    long = "x" * 30_000
    with FakeWorker("Hello") as worker:
        body = {"model": long, "messages": [{"role": "user", "content": "hi"}]}
        for reply in (
            send(worker, "POST", "/v1/chat/completions", json=body),
            send(worker, "GET", f"/v1/models/{long}"),
            send(worker, "GET", f"/v1/chat/completions/{long}"),
            send(worker, "GET", f"/{long}"),
        ):
            assert reply.status_code == 404 and len(reply.content) < 1000


def test_a_fault_of_the_gateway_closes_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server does: a client that is not told would send its next request into it."""

    def fails(*_: Any) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr(ServedModels, "models", fails)
    with FakeWorker("Hello") as worker:
        reply = send(worker, "GET", "/v1/models")
    assert (reply.status_code, reply.headers["connection"]) == (500, "close")
    assert error_of(reply)["code"] == "internal"


def test_a_message_names_some_of_many_models() -> None:
    models = {f"model-{number}": Model("m", "m", None) for number in range(5000)}
    message = str(unknown_model("other", models))
    assert "model-0, model-1, " in message and message.endswith(", and 4980 more")
    assert len(message) < 1000
