"""Constrained output of a real model: every answer ends by itself and is valid."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from jobs.api.request import ChatRequest
from tests.real.conftest import Real
from worker.local.collect import CollectingSink

pytestmark = pytest.mark.real

PROMPTS = ("a person", "a town by the sea", "a book about birds", "a recipe with eggs")
SCHEMAS: tuple[dict[str, Any], ...] = (
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 30},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    {
        "type": "array",
        "items": {"enum": ["red", "green", "blue"]},
        "minItems": 1,
        "maxItems": 4,
    },
    {
        "type": "object",
        "properties": {
            "title": {"type": "string", "minLength": 1, "maxLength": 40},
            "kind": {"anyOf": [{"const": "short"}, {"const": "long"}, {"type": "null"}]},
            "score": {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25},
            "inner": {"$ref": "#/$defs/inner"},
        },
        "required": ["title", "kind", "inner"],
        "additionalProperties": False,
        "$defs": {
            "inner": {
                "type": "object",
                "properties": {"day": {"type": "string", "format": "date"}},
                "required": ["day"],
                "additionalProperties": False,
            }
        },
    },
)


def test_every_answer_ends_by_itself_and_is_valid(smollm2: Real) -> None:
    asked = [
        (
            schema,
            ChatRequest(
                model="m",
                messages=[{"role": "user", "content": f"Describe {prompt} as JSON."}],
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": schema},
                },
                max_tokens=300,
                seed=number,
                temperature=number % 2,
            ),
        )
        for schema in SCHEMAS
        for number, prompt in enumerate(PROMPTS)
    ]
    sinks = [CollectingSink() for _ in asked]
    pairs = zip(asked, sinks, strict=True)
    chats = [smollm2.engine.submit(request, sink) for (_, request), sink in pairs]
    while not all(chat.done for chat in chats):
        smollm2.engine.step()
    for (schema, _), sink in zip(asked, sinks, strict=True):
        (choice,) = sink.completion().choices
        assert choice.finish_reason == "stop", choice.message.content
        Draft202012Validator(schema).validate(json.loads(choice.message.content or ""))
