"""Compares requests and replies with the OpenAPI document of the gateway, and replies with the
types of the openai package as well."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import jsonschema
from openai.types import Completion, FileObject, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from jobs.gateway.openapi.document import document

EVENT_DATA = ("properties", "data", "anyOf", 0, "contentSchema")  # in the schema of an event
# By the name of the document's schema. They take fields that they lack.
TYPES: dict[str, type[BaseModel]] = {
    "ChatCompletion": ChatCompletion,
    "ChatChunk": ChatCompletionChunk,
    "Completion": Completion,
    "Model": Model,
    "File": FileObject,
}


@cache
def validator(path: tuple[str | int, ...]) -> jsonschema.Draft202012Validator:
    """Of the schema at this path in the document, whose references are within it."""
    pointer = "/".join(str(one).replace("~", "~0").replace("/", "~1") for one in path)
    root = {"$id": "gateway:", **document(), "$ref": f"#/{pointer}"}
    return jsonschema.Draft202012Validator(root)


def is_described(path: tuple[str, ...], value: Any) -> bool:
    return bool(validator(path).is_valid(value))


def component(name: str) -> tuple[str, ...]:
    return ("components", "schemas", name)


def operation_of(method: str, path: str) -> tuple[str, ...] | None:
    """Where the document describes a call; None for a route that it lacks."""
    for template, operations in sorted(document()["paths"].items(), reverse=True):
        pattern = re.sub(r"\\{\w+\\}", ".+", re.escape(template))
        if method.lower() in operations and re.fullmatch(pattern, path.partition("?")[0]):
            return ("paths", template, method.lower())
    return None


def check(method: str, path: str, call: dict[str, Any], reply: Any) -> None:
    """Assert that the document describes a reply, and the request if it was accepted."""
    where = operation_of(method, path)
    if where is None:
        return  # tests/jobs/gateway/test_openapi.py has each route
    if reply.status_code == 200 and "json" in call:
        body = (*where, "requestBody", "content", "application/json", "schema")
        validator(body).validate(call["json"])
    responses = document()["paths"][where[1]][where[2]]["responses"]
    status = str(reply.status_code)
    assert status in responses, f"{method} {path}: {status} is not in its responses: {reply.text}"
    place = (
        (*where, "responses", status) if status == "200" else ("components", "responses", status)
    )
    media = reply.headers["content-type"].partition(";")[0]
    schema = (*place, "content", media, "schema")
    if media == "application/json":
        _check_value(schema, reply.content)
        return
    if media != "text/event-stream":
        validator(schema).validate(reply.text)
        return
    for line in reply.text.splitlines():
        data = line.removeprefix("data: ")
        if line.startswith("data: ") and data != "[DONE]":
            is_error = "error" in json.loads(data)
            _check_value(component("Error") if is_error else (*schema, *EVENT_DATA), data)


def _check_value(schema: tuple[str | int, ...], text: str | bytes) -> None:
    validator(schema).validate(json.loads(text))
    found: Any = document()
    for name in schema:
        found = found[name]
    if (name := found.get("$ref", "").rpartition("/")[2]) in TYPES:
        TYPES[name].model_validate_json(text, strict=True)
