"""Forms of answers: what a request may ask for, and what is refused when it is made."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jobs.api import grammar
from jobs.api.request import ChatRequest
from jobs.errors import InvalidRequest

BASE: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
OBJECT = {"type": "object"}


def schema(value: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": value}}}


def refused(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        ChatRequest(**BASE, **fields)
    return caught.value


@pytest.mark.parametrize(
    ("value", "keyword"),
    [
        ({"type": "array", "uniqueItems": True}, '"uniqueItems"'),
        ({"not": {"type": "string"}}, '"not"'),
        ({"if": {}, "then": {}}, '"if" and "then"'),
        ({"oneOf": [{"type": "string"}, {"maxLength": 2}]}, '"oneOf"'),
        ({"type": "string", "format": "css-color"}, '"format"'),
        ({"type": "string", "pattern": "(?=a)b"}, '"pattern"'),
        ({"$ref": "http://example.org/a.json"}, '"$ref"'),
        ({"type": "object", "properties": {"a": {}}, "minProperties": 1}, '"minProperties"'),
    ],
    ids=str,
)
def test_an_unsupported_keyword_is_refused_by_its_name(value: dict[str, Any], keyword: str) -> None:
    error = refused(**schema(value))
    assert error.param == "response_format"
    assert keyword in error.message
    assert refused(guided_json=value).message == error.message


def test_the_place_of_an_unsupported_keyword_is_named() -> None:
    value = {"type": "object", "properties": {"a": {"type": "array", "items": {"not": {}}}}}
    assert "(at $.properties.a.items)" in refused(**schema(value)).message


def test_a_schema_can_not_switch_the_check_off() -> None:
    lenient = {"type": "string", "not": {}, "x-guidance": {"lenient": True}}
    assert '"not"' in refused(**schema(lenient)).message


@pytest.mark.parametrize(
    ("fields", "fact"),
    [
        ({"guided_json": OBJECT, "guided_regex": "a"}, "guided_json and guided_regex exclude"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "exclude each other"),
        (
            {"guided_choice": ["a"], "response_format": {"type": "json_object"}},
            "guided_choice and response_format exclude",
        ),
        (
            {"guided_choice": ["a"], "tool_choice": "required", "tools": [TOOL]},
            "structured_outputs.choice and tool_choice exclude",
        ),
    ],
    ids=str,
)
def test_two_forms_at_once_are_an_error(fields: dict[str, Any], fact: str) -> None:
    assert fact in refused(**fields).message


@pytest.mark.parametrize(
    ("fields", "fact"),
    [
        (schema({"enum": ["a" * 1000] * 100}), "at most 65536"),
        ({"guided_regex": "a" * 70_000}, "at most 65536"),
        (
            schema({"type": "object", "properties": {f"p{i}": {} for i in range(4000)}}),
            "it is too large (grammar size",
        ),
        ({"guided_regex": "(" * 500 + ")" * 500}, "nest"),
        ({"guided_grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000}, "nested"),
        ({"guided_regex": r"(a)\1"}, "backreferences are not supported"),
        ({"guided_grammar": "start: a"}, 'unknown name: "a"'),
        ({"guided_json": "{"}, "the text is not JSON"),
        ({"guided_json": "[]"}, "must be a JSON schema"),
        ({"structured_outputs": {"whitespace_pattern": " *", "regex": "a"}}, "is not supported"),
        ({"response_format": {"type": "json_schema"}}, "json_schema.schema must be a JSON schema"),
        (schema({"type": "string", "enum": [1]}), "no answer can be made of the schema"),
        ({**schema(OBJECT), "ignore_eos": True}, "ends with it"),
        ({"tool_choice": "required"}, "tool_choice needs tools"),
        ({"tool_choice": "any", "tools": [TOOL]}, "must be auto, none, required or"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]},
            "no tool has the name 'g'; the tools are f",
        ),
        (
            {
                "tool_choice": "required",
                "tools": [
                    {"type": "function", "function": {"name": "g", "parameters": {"not": {}}}}
                ],
            },
            'tools[0].function.parameters: the keyword "not"',
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_form_that_can_not_be_kept_is_one_error(fields: dict[str, Any], fact: str) -> None:
    message = refused(**fields).message
    assert fact in message
    assert "\n" not in message


def test_former_names_are_the_same_request() -> None:
    new, old = (
        ChatRequest(**BASE, structured_outputs={"json": json.dumps(OBJECT)}),
        ChatRequest(**BASE, guided_json=OBJECT),
    )
    assert new.to_dict() == old.to_dict()
    assert new.response_format is not None and new.response_format.type == "json_schema"
    assert ChatRequest.parse(new.to_dict()).to_dict() == new.to_dict()


TAGS: dict[str, Any] = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}],
    "triggers": ["<f"],
}


def test_structural_tags_are_the_same_request_under_each_name() -> None:
    requests = [
        ChatRequest(**BASE, **fields).to_dict()
        for fields in (
            {"structural_tag": TAGS},
            {"structural_tag": json.dumps(TAGS)},
            {"structured_outputs": {"structural_tag": json.dumps(TAGS)}},
            {"response_format": TAGS},
        )
    ]
    assert all(request == requests[0] for request in requests)
    form = ChatRequest.parse(requests[0]).form
    assert form and form.field == "structured_outputs.structural_tag"


@pytest.mark.parametrize(
    ("tags", "fact"),
    [
        ({**TAGS, "triggers": ["<g"]}, "'<f>' begins with none of the triggers"),
        ({**TAGS, "structures": []}, "structures is empty"),
        ({"type": "structural_tag", "format": {}}, "other forms are not supported"),
        ({**TAGS, "structures": [{**TAGS["structures"][0], "schema": {"not": {}}}]}, '"not"'),
    ],
)
def test_structural_tags_that_can_not_be_kept_are_refused(tags: Any, fact: str) -> None:
    with pytest.raises(InvalidRequest, match=fact):
        ChatRequest(**BASE, structural_tag=tags)


def test_a_form_that_asks_for_nothing_is_taken() -> None:
    for fields in (
        {"structured_outputs": {}},
        {"structured_outputs": {"json_object": False, "disable_any_whitespace": False}},
        {"response_format": {"type": "text"}, "guided_regex": None},
        {"tools": [TOOL], "tool_choice": "auto"},
    ):
        request = ChatRequest(**BASE, **fields)
        assert request.form is None and request.forced_tools is None


def test_equal_forms_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import llguidance

    asked: list[str] = []

    class Counting:
        @staticmethod
        def validate_grammar(text: str, *_: Any, **__: Any) -> str:
            asked.append(text)
            return ""

    monkeypatch.setattr(llguidance, "LLMatcher", Counting)
    grammar._fault.cache_clear()
    for _ in range(3):
        ChatRequest(**BASE, **schema({"type": "object", "title": "once"}))
    grammar._fault.cache_clear()
    assert len(asked) == 1
