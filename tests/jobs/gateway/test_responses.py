"""/v1/responses: requests and answers as the messages of a chat, and what is stored of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jobs import JobError, keys
from jobs.errors import ERROR_CODES
from jobs.gateway.failures import STATUS
from jobs.gateway.responses import items
from jobs.testing import Answer, FakeWorker
from tests.jobs.gateway.in_process import send
from tests.jobs.gateway.response_types import events_of, items_of, response_of

PATH = "/v1/responses"
BODY: dict[str, Any] = {"model": "any", "input": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def create(worker: FakeWorker, **fields: Any) -> dict[str, Any]:
    reply = send(worker, "POST", PATH, json={**BODY, **fields})
    assert reply.status_code == 200, reply.text
    response_of(reply.json())
    return dict(reply.json())


def streamed(text: str, first: int = 0) -> list[Any]:
    """The events in the body of a reply."""
    content = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    names = [line[7:] for line in text.splitlines() if line.startswith("event: ")]
    assert names == [one["type"] for one in content]
    ids = [line[4:] for line in text.splitlines() if line.startswith("id: ")]
    assert ids == [str(one["sequence_number"]) for one in content]
    return events_of(content, first)


def error_of(reply: Any) -> tuple[int, str, str]:
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return reply.status_code, error["code"], error["param"]


def test_an_answer_is_items() -> None:
    worker = FakeWorker(Answer("Hello", reasoning="Hm", tool_calls=[CALL]))
    response = create(worker, instructions="Be brief.", tools=[ADD], metadata={"a": "b"})
    assert response["status"] == "completed" and response["incomplete_details"] is None
    reasoning, message, call = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm"}]
    assert message["content"][0]["text"] == "Hello"
    assert (call["call_id"], call["name"], call["arguments"]) == ("c1", "add", '{"a": 1}')
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 1}
    assert response["metadata"] == {"a": "b"}
    request = worker.requests[0]
    assert [(one.role, one.text) for one in request.messages] == [
        ("system", "Be brief."),
        ("user", "hi"),
    ]
    assert request.stream is False and request.metadata == {"a": "b"}
    assert request.job.id == response["id"].removeprefix("resp_")


def test_an_answer_of_nothing_is_an_empty_message() -> None:
    (message,) = create(FakeWorker(Answer("")))["output"]
    assert message["content"][0]["text"] == ""
    reply = send(FakeWorker(Answer("")), "POST", PATH, json={**BODY, "stream": True})
    assert [one.type for one in streamed(reply.text)][2:] == [
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]


def test_an_answer_that_is_cut_is_incomplete() -> None:
    worker = FakeWorker(Answer("too lo", finish_reason="length"))
    response = create(worker, max_output_tokens=3)
    assert response["status"] == response["output"][0]["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["max_output_tokens"] == worker.requests[0].max_tokens == 3
    events = streamed(send(worker, "POST", PATH, json={**BODY, "stream": True}).text)
    assert events[-1].type == "response.incomplete"
    assert events[-2].item.status == "incomplete"


def test_items_are_messages() -> None:
    given: list[dict[str, Any]] = [
        {"role": "developer", "content": "Add."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "1+2"}]},
        {"type": "reasoning", "id": "r1", "summary": [{"type": "summary_text", "text": "sum"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I add.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "3"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "4"}],
        },
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]},
        {"type": "function_call", "id": "r1", "call_id": "c3", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c3", "output": ""},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
        },
    ]
    worker = FakeWorker("x")
    response = create(worker, input=given)
    messages = [one.to_dict() for one in worker.requests[0].messages]
    calls = [
        {**CALL, "id": f"c{n}", "function": {"name": "add", "arguments": "{}"}} for n in (1, 2)
    ]
    assert messages == [
        {"role": "developer", "content": "Add."},
        {"role": "user", "content": "1+2"},
        {
            "role": "assistant",
            "content": "I add.",
            "reasoning_content": "sum",
            "tool_calls": calls,
        },
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "tool", "tool_call_id": "c2", "content": "4"},
        {
            "role": "assistant",
            "reasoning_content": "so",
            "tool_calls": [{**calls[0], "id": "c3"}],
        },
        {"role": "tool", "tool_call_id": "c3", "content": ""},
        {
            "role": "user",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
    ]
    path = f"{PATH}/{response['id']}/input_items"
    listed = send(worker, "GET", path, params={"order": "asc", "limit": 100}).json()
    found = items_of(listed["data"])
    assert [one.type for one in found] == [one.get("type", "message") for one in given]
    assert found[2].id == "r1" and len({one.id for one in found}) == len(given)
    assert not listed["has_more"]


def test_input_items_come_in_pages() -> None:
    worker = FakeWorker("x")
    texts = [str(number) for number in range(5)]
    response = create(worker, input=[{"role": "user", "content": text} for text in texts])
    path = f"{PATH}/{response['id']}/input_items"
    seen: list[str] = []
    after: dict[str, Any] = {}
    while True:
        page = send(worker, "GET", path, params={"limit": 2, **after}).json()
        seen += [one["content"][0]["text"] for one in page["data"]]
        assert (page["first_id"], page["last_id"]) == (
            page["data"][0]["id"],
            page["data"][-1]["id"],
        )
        after = {"after": page["last_id"]}
        if not page["has_more"]:
            break
    assert seen == texts[::-1]
    for wrong in ({"limit": 0}, {"limit": 101}, {"limit": "x"}, {"order": "up"}, {"after": "no"}):
        status, _, param = error_of(send(worker, "GET", path, params=wrong))
        assert (status, [param]) == (400, list(wrong))


def test_tools_that_are_no_functions_are_skipped() -> None:
    worker = FakeWorker("x")
    tools = [{"type": "web_search"}, ADD, {"type": "mcp", "server_label": "s"}, {"type": "new"}]
    response = create(worker, tools=tools, tool_choice="required", parallel_tool_calls=False)
    assert [tool["name"] for tool in response["tools"]] == ["add"]
    assert (response["tool_choice"], response["parallel_tool_calls"]) == ("required", False)
    request = worker.requests[0]
    assert [tool.function.name for tool in request.tools] == ["add"]
    assert (request.tool_choice, request.parallel_tool_calls) == ("required", False)

    for choice in ("required", {"type": "web_search_preview"}):
        response = create(worker, tools=[{"type": "web_search"}], tool_choice=choice)
        assert (response["tools"], response["tool_choice"]) == ([], "auto")
        assert (worker.requests[-1].tools, worker.requests[-1].tool_choice) == (None, None)


def test_a_choice_names_a_function_or_allows_some() -> None:
    worker = FakeWorker("x")
    tools = [ADD, {**ADD, "name": "subtract"}]
    response = create(worker, tools=tools, tool_choice={"type": "function", "name": "add"})
    assert response["tool_choice"] == {"type": "function", "name": "add"}
    assert [one.name for one in worker.requests[-1].forced_tools or ()] == ["add"]
    allowed = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "add"}],
    }
    assert create(worker, tools=tools, tool_choice=allowed)["tool_choice"] == allowed
    assert [tool.function.name for tool in worker.requests[-1].tools] == ["add"]
    assert worker.requests[-1].tool_choice == "required"


def test_other_fields_are_those_of_a_chat() -> None:
    worker = FakeWorker("x")
    form = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
    response = create(
        worker,
        text={"format": form, "verbosity": "low"},
        reasoning={"effort": "low", "summary": "auto"},
        truncation="auto",
        temperature=0.5,
        top_p=0.9,
        seed=7,
        user="u",
        include=["message.output_text.logprobs", "reasoning.encrypted_content"],
        top_logprobs=2,
        max_tool_calls=3,
        service_tier="flex",
        stream_options={"include_obfuscation": True},
        prompt_cache_key="k",
        safety_identifier="s",
        job={"run": "r", "retries": 1},
    )
    request = worker.requests[0]
    assert request.response_format.json_schema == {"name": "n", "schema": SCHEMA, "strict": True}
    assert (request.reasoning_effort, request.truncate, request.seed) == ("low", "oldest", 7)
    assert (request.temperature, request.top_p, request.user) == (0.5, 0.9, "u")
    assert (request.logprobs, request.top_logprobs, request.job.run) == (True, 2, "r")
    assert response["text"]["format"] == {**form, "description": None}
    assert response["reasoning"] == {"effort": "low", "summary": "auto"}
    assert (response["temperature"], response["truncation"]) == (0.5, "auto")
    create(worker, text={"format": {"type": "json_object"}})
    assert worker.requests[-1].response_format.type == "json_object"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [{}]}, "input[0].type"),
        ({"input": [{"type": ["message"]}]}, "input[0].type"),
        ({"input": [{"type": "computer_call_output"}]}, "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": ["user"], "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": ["x"]}]}, "input[0].content[0]"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": 1}]}]},
            "input[0].content[0].text",
        ),
        (
            {"input": [{"type": "function_call", "name": "f", "arguments": {}}]},
            "input[0].arguments",
        ),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "reasoning", "summary": 3}]}, "input[0].summary"),
        ({"input": "\ud800"}, "input"),
        ({"instructions": ["x"]}, "instructions"),
        ({"previous_response_id": 3}, "previous_response_id"),
        ({"tools": "x"}, "tools"),
        ({"tools": [3]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name"),
        ({"tools": [{**ADD, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{**ADD, "parameters": 1}]}, "tools[0].parameters"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "name": "no"}}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.tools"),
        ({"text": "x"}, "text"),
        ({"text": {"format": "x"}}, "text.format"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"truncation": "all"}, "truncation"),
        ({"include": "x"}, "include"),
        ({"top_logprobs": 99}, "top_logprobs"),
        ({"temperature": "hot"}, "temperature"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"background": 1}, "background"),
        ({"background": True, "store": False}, "store"),
        ({"store": "yes"}, "store"),
        ({"stream": 1}, "stream"),
        ({"prompt_cache_key": 1}, "prompt_cache_key"),
        ({"conversation": "c"}, "conversation"),
        ({"messages": []}, "messages"),
        ({"n": 2}, "n"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt_token_ids": [1]}, "prompt_token_ids"),
        ({"return_token_ids": True}, "return_token_ids"),
        ({"job": "x"}, "job"),
        ({"job": {"id": "a b"}}, "job.id"),
        ({"job": {"id": 3}}, "job.id"),
        ({"job": {"session": "s"}}, "job.session"),
        ({"job": {"result_ttl": 0}}, "job.result_ttl"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_wrong_fields_are_refused_by_name_and_leave_nothing(
    fields: dict[str, Any], param: str
) -> None:
    worker = FakeWorker("x")
    content = json.dumps({**BODY, **fields}).encode()
    headers = {"content-type": "application/json"}
    reply = send(worker, "POST", PATH, content=content, headers=headers)
    assert error_of(reply) == (400, "invalid_request", param)
    assert "messages" not in reply.json()["error"]["message"] or "messages" in fields
    assert not worker.client().redis.keys("chatjobs:*:response")


def test_two_responses_go_on_from_one() -> None:
    worker = FakeWorker(lambda request: f"<{request.messages[-1].text}>")
    first = create(worker, input="a", instructions="Old.")
    for text in ("b", "c"):
        response = create(worker, input=text, previous_response_id=first["id"], instructions="New.")
        assert response["previous_response_id"] == first["id"]
        assert [one.text for one in worker.requests[-1].messages] == ["New.", "a", "<a>", text]
    last = create(worker, input="d", previous_response_id=response["id"])
    assert [one.text for one in worker.requests[-1].messages] == ["a", "<a>", "c", "<c>", "d"]
    for id in (first["id"], response["id"]):  # the conversation does not need them
        send(worker, "DELETE", f"{PATH}/{id}")
    create(worker, input="e", previous_response_id=last["id"], store=False)
    assert [one.text for one in worker.requests[-1].messages][-3:] == ["d", "<d>", "e"]


@pytest.mark.parametrize(
    "id", ["resp_none", "", "none", "resp_", "resp_a b", "resp_\x00", "x" * 9999]
)
def test_a_previous_response_that_there_is_none_of_is_refused(id: str) -> None:
    reply = send(FakeWorker("x"), "POST", PATH, json={**BODY, "previous_response_id": id})
    assert error_of(reply) == (400, "previous_response_not_found", "previous_response_id")
    assert len(reply.content) < 1000


def test_a_response_without_an_answer_has_nothing_to_go_on_from() -> None:
    worker = FakeWorker([Answer("", delay=float("inf")), "x"])
    running = send(worker, "POST", PATH, json={**BODY, "background": True}).json()
    ask = {**BODY, "previous_response_id": running["id"]}
    reply = send(worker, "POST", PATH, json=ask)
    assert error_of(reply) == (400, "invalid_request", "previous_response_id")
    assert "no answer yet" in reply.text
    send(worker, "POST", f"{PATH}/{running['id']}/cancel")
    reply = send(worker, "POST", PATH, json=ask)
    assert error_of(reply) == (400, "invalid_request", "previous_response_id")
    assert "was cancelled" in reply.text


def test_a_stored_response_is_the_same_until_it_is_deleted() -> None:
    worker = FakeWorker("Hello")
    response = create(worker, job={"id": "mine"})
    path = f"{PATH}/{response['id']}"
    assert send(worker, "GET", path).json() == response
    assert send(worker, "POST", f"{path}/cancel").json() == response
    assert send(worker, "DELETE", path).json() == {
        "id": "resp_mine",
        "object": "response",
        "deleted": True,
    }
    for method, place in (
        ("GET", path),
        ("GET", f"{path}?stream=true"),
        ("DELETE", path),
        ("POST", f"{path}/cancel"),
        ("GET", f"{path}/input_items"),
        ("GET", "/v1/chat/completions/mine"),
    ):
        assert error_of(send(worker, method, place)) == (404, "not_found", "id")


def test_a_response_that_is_not_stored_can_only_be_read_once() -> None:
    worker = FakeWorker("Hello")
    response = create(worker, store=False)
    assert response["store"] is False and worker.requests[0].store is False
    assert error_of(send(worker, "GET", f"{PATH}/{response['id']}")) == (404, "not_found", "id")


def test_a_response_expires_with_its_job() -> None:
    worker = FakeWorker("Hello")
    create(worker, job={"id": "mine", "result_ttl": 500})
    create(worker, job={"id": "other"})
    redis = worker.client().redis
    for job, seconds in (("mine", 500), ("other", 86_400)):
        assert seconds - 100 < redis.ttl(keys.response(job)) <= seconds
        assert seconds - 100 < redis.ttl(f"rq:job:{job}") <= seconds
    redis.delete("rq:job:mine")
    assert error_of(send(worker, "GET", f"{PATH}/resp_mine")) == (404, "not_found", "id")


def test_a_chat_is_no_response() -> None:
    worker = FakeWorker("Hello")
    chat = {"model": "any", "messages": [{"role": "user", "content": "x"}], "job": {"id": "chat"}}
    send(worker, "POST", "/v1/chat/completions", json=chat)
    for id in ("resp_chat", "chat", "chatcmpl-chat", "resp_..", "resp_" + "x" * 201):
        assert error_of(send(worker, "GET", f"{PATH}/{id}")) == (404, "not_found", "id")


def test_the_same_request_again_is_the_same_response() -> None:
    worker = FakeWorker("Hello")
    response = create(worker, job={"id": "mine"})
    assert create(worker, job={"id": "mine"}) == response
    assert len(worker.requests) == 1
    reply = send(worker, "POST", PATH, json={**BODY, "input": "other", "job": {"id": "mine"}})
    assert reply.status_code == 400
    assert send(worker, "GET", f"{PATH}/{response['id']}").json() == response


@pytest.mark.parametrize("code", ERROR_CODES)
def test_a_job_that_fails_is_an_error_an_event_and_a_state(code: Any) -> None:
    error = JobError(code, "no luck")
    worker = FakeWorker(Answer("", error=error))
    reply = send(worker, "POST", PATH, json={**BODY, "job": {"retries": 0, "id": "mine"}})
    assert error_of(reply)[:2] == (STATUS[code], code)
    state = response_of(send(worker, "GET", f"{PATH}/resp_mine").json())
    body = {**BODY, "stream": True, "job": {"retries": 0}}
    last = streamed(send(worker, "POST", PATH, json=body).text)[-1]
    assert last.type == "response.failed"
    for response in (state, last.response):
        if code == "cancelled":
            assert (response.status, response.error) == ("cancelled", None)
            continue
        assert (response.status, response.error.type) == ("failed", code)
        about_request = STATUS[code] == 400
        assert response.error.code == ("invalid_prompt" if about_request else "server_error")


def test_log_probabilities_are_those_of_the_text() -> None:
    answer = create(FakeWorker("x"))["output"][0]["content"][0]
    assert answer["logprobs"] == []


def test_an_unknown_model_leaves_nothing() -> None:
    worker = FakeWorker("x")
    reply = send(worker, "POST", PATH, json={**BODY, "model": "gpt-9"})
    assert error_of(reply) == (404, "model_not_found", "model")
    assert not worker.client().redis.keys("chatjobs:*:response")


@pytest.mark.parametrize("after", [-1, 0, 5, 9, 10**9])
def test_a_stream_goes_on_after_any_number(after: int) -> None:
    worker = FakeWorker("one two three")
    body = {**BODY, "stream": True, "job": {"id": "mine"}}
    whole = streamed(send(worker, "POST", PATH, json=body).text)
    worker.client().redis.delete(keys.log("mine"))
    path = f"{PATH}/resp_mine?stream=true"
    headers = {} if after < 0 else {"last-event-id": str(after)}
    rest = send(worker, "GET", path, headers=headers)
    assert rest.headers["x-request-id"] == "mine"
    assert streamed(rest.text, after + 1) == whole[after + 1 :]
    if after >= 0:
        assert send(worker, "GET", f"{path}&starting_after={after}").text == rest.text


@pytest.mark.parametrize(
    ("query", "headers", "param"),
    [
        ("stream=yes", {}, "stream"),
        ("stream=true&starting_after=-1", {}, "starting_after"),
        ("stream=true&starting_after=9%2E5", {}, "starting_after"),
        ("stream=true&starting_after=" + "9" * 5000, {}, "starting_after"),
        ("stream=true", {"last-event-id": "1-1"}, "Last-Event-ID"),
        ("stream=true", {"last-event-id": "9" * 5000}, "Last-Event-ID"),
    ],
)
def test_a_number_that_no_event_has_is_refused(
    query: str, headers: dict[str, str], param: str
) -> None:
    worker = FakeWorker("x")
    id = create(worker)["id"]
    reply = send(worker, "GET", f"{PATH}/{id}?{query}", headers=headers)
    assert error_of(reply) == (400, "invalid_request", param)


@pytest.fixture
def tenants(tmp_path: Path) -> Any:
    """Sends requests of the tenants a, who may store two responses, and b."""
    file = tmp_path / "keys.toml"
    file.write_text('[tenants.a]\nkeys = ["a"]\nresponses = 2\n[tenants.b]\nkeys = ["b"]\n')
    worker = FakeWorker("Hello")

    def ask(key: str, method: str, path: str, **call: Any) -> Any:
        headers = {"authorization": f"Bearer {key}"}
        settings = {"api_key_file": file}
        return send(worker, method, path, settings=settings, headers=headers, **call)

    ask.redis = worker.client().redis  # type: ignore[attr-defined]
    return ask


def test_a_response_is_that_of_its_tenant(tenants: Any) -> None:
    id = tenants("a", "POST", PATH, json=BODY).json()["id"]
    job = {**BODY, "job": {"id": id.removeprefix("resp_")}}
    path = f"{PATH}/{id}"
    assert tenants("a", "GET", path).status_code == 200
    for method, place in (
        ("GET", path),
        ("GET", f"{path}?stream=true"),
        ("GET", f"{path}/input_items"),
        ("POST", f"{path}/cancel"),
        ("DELETE", path),
    ):
        assert error_of(tenants("b", method, place)) == (404, "not_found", "id")
    reply = tenants("b", "POST", PATH, json={**BODY, "previous_response_id": id})
    assert reply.json()["error"]["code"] == "previous_response_not_found"
    assert error_of(tenants("b", "POST", PATH, json=job)) == (400, "invalid_request", "job.id")
    assert tenants("a", "GET", path).status_code == 200


def test_a_tenant_may_store_so_many_responses(tenants: Any) -> None:
    first, second = (tenants("a", "POST", PATH, json=BODY).json()["id"] for _ in range(2))
    full = tenants("a", "POST", PATH, json=BODY)
    assert (full.status_code, full.json()["error"]["code"]) == (429, "insufficient_quota")
    assert full.headers["x-should-retry"] == "false"
    assert "'a' has 2 stored responses" in full.text
    assert tenants("a", "POST", PATH, json={**BODY, "store": False}).status_code == 200
    assert tenants("b", "POST", PATH, json=BODY).status_code == 200
    again = {**BODY, "job": {"id": second.removeprefix("resp_")}}
    assert tenants("a", "POST", PATH, json=again).status_code == 200
    tenants("a", "DELETE", f"{PATH}/{first}")
    assert tenants("a", "POST", PATH, json=BODY).status_code == 200
    assert tenants("a", "POST", PATH, json=BODY).status_code == 429
    key = keys.tenant_responses("a")
    tenants.redis.zadd(key, {second.removeprefix("resp_"): 1})  # it has expired
    assert tenants("a", "POST", PATH, json=BODY).status_code == 200


def test_a_refused_request_takes_no_place(tenants: Any) -> None:
    for _ in range(3):
        assert tenants("a", "POST", PATH, json={**BODY, "top_p": 2}).status_code == 400
    assert tenants.redis.zcard(keys.tenant_responses("a")) == 0


@pytest.mark.parametrize(
    "value",
    [
        "",
        "x",
        "[]",
        "{}",
        '{"response": {}, "items": []}',
        '{"response": {}, "items": 3}',
        "[" * 9999,
    ],
)
def test_a_stored_response_of_another_program_is_named(value: str) -> None:
    worker = FakeWorker("x")
    path = f"{PATH}/{create(worker, job={'id': 'mine'})['id']}"
    redis = worker.client().redis
    redis.hset(keys.response("mine"), "content", value)
    reply = send(worker, "GET", path)
    assert reply.status_code == 500 and "{mine}:response" in reply.text
    redis.delete(keys.response("mine"))
    redis.set(keys.response("mine"), value)
    reply = send(worker, "GET", path)
    assert reply.status_code == 500 and "RENAME" in reply.text
    assert create(worker)["status"] == "completed"


def test_ids_are_kept_up_to_a_length() -> None:
    worker = FakeWorker("x")
    given = [{"role": "user", "content": "x", "id": id} for id in ("\x00 </é", "x" * 9999, 3, "")]
    id = create(worker, input=given)["id"]
    listed = send(worker, "GET", f"{PATH}/{id}/input_items?order=asc").json()["data"]
    assert listed[0]["id"] == "\x00 </é"
    assert all(len(one["id"]) <= items.MAX_ID for one in listed)
    assert len({one.id for one in items_of(listed)}) == 4
