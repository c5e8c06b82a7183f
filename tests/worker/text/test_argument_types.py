"""The types of arguments that a syntax writes as text: those of the parameter's JSON schema."""

from __future__ import annotations

import json
from typing import Any

import pytest

from worker.text.tool_parser import SYNTAXES, ToolParser

DEFS: dict[str, Any] = {
    "N": {"type": "integer"},
    "Level": {"enum": [1, 2, 3]},
    "Name/with~signs": {"type": "integer"},
    "Chain": {"$ref": "#/$defs/N"},
    "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "integer"}]},
    "Wide": {"anyOf": [{"$ref": "#/$defs/Wide"}] * 50 + [{"type": "string"}]},
    "Args": {"properties": {"x": {"type": "boolean"}}},
}


def argument(parameters: dict[str, Any], text: str) -> Any:
    """The argument x of a call that writes it as text."""
    parser = ToolParser(SYNTAXES["qwen3_coder"]({"f": {"$defs": DEFS, **parameters}}))
    call = f"<tool_call>\n<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>"
    _, calls = parser.push(call)
    _, more = parser.flush()
    return json.loads((calls + more)[0].arguments)["x"]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"$ref": "#/$defs/N"}, "140", 140),
        ({"$ref": "#/$defs/Chain"}, "140", 140),
        ({"$ref": "#/$defs/Name~1with~0signs"}, "140", 140),
        ({"$ref": "#/$defs/Name%2Fwith~0signs"}, "140", "140"),
        ({"$ref": "#/$defs/Loop"}, "140", 140),
        ({"$ref": "#/$defs/Wide"}, "140", "140"),
        ({"$ref": "#/properties/y/anyOf/1"}, "140", 140),
        ({"$ref": "#/$defs/Args"}, '{"x": true}', {"x": True}),
        ({"$ref": "#/$defs/None"}, '{"a": 1}', {"a": 1}),
        ({"$ref": "https://example.com/n.json"}, '{"a": 1}', {"a": 1}),
        ({"allOf": [{"$ref": "#/$defs/N"}], "description": "a number"}, "140", 140),
        ({"allOf": [{"type": ["integer", "string"]}, {"type": "string"}]}, "140", "140"),
        ({"allOf": [{"type": "number"}, {"minimum": 0}]}, "1.5", 1.5),
        ({"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]}, "140", 140),
        ({"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]}, "null", None),
        ({"oneOf": [{"const": "auto"}, {"$ref": "#/$defs/N"}]}, "140", 140),
        ({"oneOf": [{"const": "auto"}, {"$ref": "#/$defs/N"}]}, "auto", "auto"),
        ({"type": ["integer", "null"]}, "None", None),
        ({"type": "integer", "nullable": True}, "null", None),
        ({"type": "string", "nullable": True}, "null", None),
        ({"type": "string"}, "null", "null"),
        ({"type": "string"}, "140", "140"),
        ({"type": "integer"}, "140.0", 140),
        ({"type": "integer"}, "1e300", "1e300"),
        ({"type": "integer"}, "1.5", "1.5"),
        ({"type": "number"}, "140", 140),
        ({"enum": [1, 2, 140]}, "140", 140),
        ({"enum": ["1", "140"]}, "140", "140"),
        ({"enum": ["140", 150]}, "140", "140"),
        ({"enum": ["140", 150]}, "150", 150),
        ({"enum": [True, "on"]}, "true", True),
        ({"enum": [1, "on"]}, "true", "true"),
        ({"enum": ["on", None]}, "null", None),
        ({"enum": ["on", "off"]}, '"on"', "on"),
        ({"enum": [1, 2], "type": "integer"}, "7", 7),
        ({"const": 140}, "140", 140),
        ({"const": 140.0}, "140", 140),
        ({"const": {"a": [1]}}, "{'a': [1]}", {"a": [1]}),
        ({"$ref": "#/$defs/Level"}, "2", 2),
        ({"items": {"type": "string"}}, "['a']", ["a"]),
        ({"prefixItems": [{"type": "string"}]}, "['a']", ["a"]),
        ({"additionalProperties": {"type": "string"}}, '{"a": "b"}', {"a": "b"}),
        ({"type": "some"}, "140", "140"),
        ({"type": 7, "enum": 7, "anyOf": 7, "$ref": 7}, "140", "140"),
        (True, "140", "140"),
        ({}, "140", "140"),
    ],
)
def test_the_schema_decides_the_type(schema: Any, text: str, value: Any) -> None:
    others = {"y": {"anyOf": [{"type": "string"}, {"type": "integer"}]}}
    found = argument({"type": "object", "properties": {"x": schema, **others}}, text)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    "parameters",
    [
        {"$ref": "#/$defs/Args"},
        {"allOf": [{"$ref": "#/$defs/Args"}, {"properties": {"y": {}}}]},
        {"anyOf": [{"properties": {"y": {}}}, {"properties": {"x": {"type": "boolean"}}}]},
        {"properties": {"y": {}}, "additionalProperties": {"type": "boolean"}},
    ],
)
def test_the_schema_of_a_parameter_may_be_elsewhere(parameters: dict[str, Any]) -> None:
    assert argument(parameters, "True") is True


def test_a_schema_of_great_depth_says_nothing() -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(5000):
        schema = {"anyOf": [schema]}
    assert argument({"properties": {"x": schema}}, "140") == "140"
