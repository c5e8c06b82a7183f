"""The OpenAPI document has each route, field, status and schema that the gateway has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from jobs.gateway.openapi.document import document
from jobs.testing import FakeWorker
from tests.jobs.api.test_requests_page import BASE, table
from tests.jobs.gateway.described import component, is_described
from tests.jobs.gateway.in_process import send
from tests.jobs.gateway.test_http_page import section, served

CHAT, COMPLETION = component("ChatRequest"), component("CompletionRequest")
KEYS = '[tenants.a]\nkeys = ["first"]\n'


def test_the_document_has_each_route_and_no_other() -> None:
    listed = {
        (method.upper(), path)
        for path, operations in document()["paths"].items()
        for method in operations
    }
    missing = "\n".join(f"  {method} {path}" for method, path in sorted(served() - listed))
    assert not missing, (
        "The OpenAPI document lacks these routes. Describe each as an Operation, in a Family of "
        "jobs/gateway/openapi/ that jobs/gateway/openapi/document.py has in FAMILIES "
        f"(schemas_of makes the schemas of pydantic models):\n{missing}"
    )
    assert listed <= served(), f"no route has these operations: {sorted(listed - served())}"


def test_the_document_is_served_without_a_key(tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text(KEYS)
    settings = {"api_key_file": tmp_path / "keys.toml"}
    reply = send(FakeWorker("x"), "GET", "/openapi.json", settings=settings)
    assert (reply.status_code, reply.json()) == (200, json.loads(json.dumps(document())))
    assert send(FakeWorker("x"), "GET", "/v1/models", settings=settings).status_code == 401


def test_operations_have_ids_of_their_own_and_the_statuses_of_the_page() -> None:
    operations = [one for path in document()["paths"].values() for one in path.values()]
    ids = [one["operationId"] for one in operations]
    assert len(ids) == len(set(ids))
    described = {int(status) for one in operations for status in one["responses"]} - {200}
    listed = {int(found) for found in re.findall(r"^\| (\d+) \|", section("Errors"), re.M)}
    assert described == listed - {405}  # of methods that are no operations


def test_schemas_are_json_schema_and_refer_to_each_other() -> None:
    used = set()
    for schema, value in _dicts(document()):
        if isinstance(target := schema.get("$ref"), str):
            used.add(target)
            found: Any = document()
            for name in target.removeprefix("#/").split("/"):
                found = found[name]
        if value == "schema":
            jsonschema.Draft202012Validator.check_schema(schema)
    for kind, content in document()["components"].items():
        for name, one in content.items():
            if kind == "schemas":
                jsonschema.Draft202012Validator.check_schema(one)
            if kind != "securitySchemes":
                assert f"#/components/{kind}/{name}" in used, f"nothing refers to {kind} {name}"


def _dicts(value: Any, name: str = "") -> Iterator[tuple[dict[str, Any], str]]:
    """All objects in the document, with the names that they have."""
    if isinstance(value, dict):
        yield value, name
        for key, one in value.items():
            yield from _dicts(one, key)
    elif isinstance(value, list):
        for one in value:
            yield from _dicts(one)


@pytest.mark.parametrize("title", ["Fields of a request", "Fields of a message"])
def test_each_field_of_the_page_is_as_the_page_says(title: str) -> None:
    of_message = title.endswith("message")
    for name, state, example, neutral in table(title):
        for value, taken in ((example, state != "refused"), (neutral, True), (None, True)):
            if value is None and name in ("model", "messages", "role", "job"):
                continue  # they can't be null
            body = {**BASE, name: value}
            if of_message:
                message = {"role": "assistant", "content": "x", name: value}
                body = {**BASE, "messages": [message]}
            assert is_described(CHAT, body) is taken, (name, value)
    if not of_message:
        names = {one.name for one in table(title)} | {"background"}
        assert set(document()["components"]["schemas"]["ChatRequest"]["properties"]) == names


@pytest.mark.parametrize(
    ("fields", "taken"),
    [
        ({}, True),
        ({"nonsense": None}, False),
        ({"top_p": 0}, False),
        ({"top_p": 1.01}, False),
        ({"temperature": "1"}, False),
        ({"n": 129}, False),
        ({"logit_bias": {"x": 1}}, False),
        ({"logit_bias": {"1": 101}}, False),
        ({"stop": ["a", ""]}, False),
        ({"allowed_token_ids": []}, False),
        ({"job": {"id": "a b"}}, False),
        ({"job": {"run": ".x"}}, False),
        ({"job": {"delay": -1}}, False),
        ({"request_id": "a.b"}, False),
        ({"guided_choice": ["a"]}, True),
        ({"guided_choice": []}, False),
        *(({name: ""}, False) for name in ("guided_json", "guided_regex", "guided_grammar")),
        ({"structural_tag": ""}, False),
        ({"background": 1}, False),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, False),
        ({"messages": [{"role": "user", "content": ["a", {"type": "text", "text": "b"}]}]}, True),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, False),
        ({"messages": [{"role": "robot", "content": "a"}]}, False),
        ({"messages": []}, False),
    ],
)
def test_what_the_document_says_of_a_chat_is_what_the_gateway_does(
    fields: dict[str, Any], taken: bool
) -> None:
    body = {"model": "any", "messages": BASE["messages"], **fields}
    assert is_described(CHAT, body) is taken
    reply = send(FakeWorker("x"), "POST", "/v1/chat/completions", json=body)
    assert (reply.status_code == 200) is taken, reply.text


@pytest.mark.parametrize(
    ("fields", "taken"),
    [
        ({}, True),
        ({"prompt": [1, 2]}, True),
        ({"prompt": ["a", [1, 2]]}, True),
        ({"prompt": []}, False),
        ({"prompt": ["a", []]}, False),
        ({"prompt": ["a"] * 1001}, False),
        ({"prompt": None}, False),
        ({"echo": True, "max_tokens": 0, "logprobs": 20}, True),
        ({"logprobs": 21}, False),
        ({"logprobs": True}, False),
        ({"max_tokens": -1}, False),
        ({"suffix": ""}, True),
        ({"suffix": "x"}, False),
        ({"messages": BASE["messages"]}, False),
        ({"prompt_token_ids": [1]}, False),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, False),
        ({"chat_template_kwargs": {"a": 1}}, False),
        ({"best_of": 1, "stop": "x", "job": {"tags": ["a"]}, "background": True}, True),
        ({"best_of": 2}, False),
    ],
)
def test_what_the_document_says_of_a_completion_is_what_the_gateway_does(
    fields: dict[str, Any], taken: bool
) -> None:
    body = {"model": "any", "prompt": "a", **fields}
    assert is_described(COMPLETION, body) is taken
    reply = send(FakeWorker("x"), "POST", "/v1/completions", json=body)
    assert (reply.status_code == 200) is taken, reply.text


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        ("/v1/files", "after", ""),
        ("/v1/batches", "after", ""),
        ("/v1/files", "after", "batch_" + "0" * 28),
        ("/v1/batches", "after", "file-" + "0" * 28),
        ("/v1/chat/completions/{id}/stream", "Last-Event-ID", "no event"),
    ],
)
def test_what_the_gateway_refuses_of_a_parameter_is_not_described(
    path: str, name: str, value: str
) -> None:
    operation = document()["paths"][path]["get"]
    (described,) = (one for one in operation["parameters"] if one["name"] == name)
    given: Any = "headers" if described["in"] == "header" else "params"
    reply = send(FakeWorker("x"), "GET", path.format(id="mine"), **{given: {name: value}})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, name)
    assert not jsonschema.Draft202012Validator(described["schema"]).is_valid(value)


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        ("/v1/batches", "completion_window", "0d"),
        ("/v1/batches", "metadata", {"x" * 65: "a"}),
        ("/v1/responses", "previous_response_id", ""),
        ("/v1/responses", "previous_response_id", "chatcmpl-1"),
    ],
)
def test_what_the_gateway_refuses_of_a_body_is_not_described(
    path: str, name: str, value: Any
) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/batches": {"input_file_id": "a", "endpoint": "/v1/responses"}
        | {"completion_window": "24h"},
        "/v1/responses": {"model": "any", "input": "a"},
    }
    schema = ("paths", path, "post", "requestBody", "content", "application/json", "schema")
    assert is_described(schema, bodies[path])
    reply = send(FakeWorker("x"), "POST", path, json={**bodies[path], name: value})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, name)
    assert not is_described(schema, {**bodies[path], name: value})


def test_a_form_is_described_by_its_own_fields() -> None:
    """As tests/jobs/gateway/test_files.py sends them."""
    schema = ("paths", "/v1/files", "post", "requestBody", "content", "multipart/form-data")
    form = {"file": "x", "purpose": "batch"}
    expiry = {"expires_after[anchor]": "created_at", "expires_after[seconds]": 3600}
    for fields, described in (
        ({}, True),
        (expiry, True),
        ({"expires_after[seconds]": 3600}, False),
        ({"expires_after": {"anchor": "created_at", "seconds": 3600}}, False),
    ):
        assert is_described((*schema, "schema"), {**form, **fields}) is described
