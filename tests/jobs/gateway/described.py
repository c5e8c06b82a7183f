"""Compares requests and replies with the OpenAPI document of the gateway."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import jsonschema

from jobs.gateway.openapi.document import document


@cache
def validator(path: tuple[str, ...]) -> jsonschema.Draft202012Validator:
    """Of the schema at this path in the document, whose references are within it."""
    pointer = "/".join(one.replace("~", "~0").replace("/", "~1") for one in path)
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
    if media == "text/event-stream":
        for line in reply.text.splitlines():
            if line.startswith("data: ") and line != "data: [DONE]":
                data = json.loads(line.removeprefix("data: "))
                validator(
                    component("Error") if "error" in data else (*schema, "x-event-data")
                ).validate(data)
    else:
        validator(schema).validate(reply.json() if media == "application/json" else reply.text)
