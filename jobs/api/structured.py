"""Fields of a request that hold its answer to a form, under the names of OpenAI and vLLM.

What asks for JSON becomes `response_format`, whatever its name; the rest is `structured_outputs`.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from jobs.api import grammar
from jobs.api.grammar import Grammar
from jobs.api.wire import Text, Wire, to_invalid_request
from jobs.errors import invalid

# vLLM's other names: of a key of structured_outputs.
FORMER_NAMES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "structural_tag": "structural_tag",
}
MAX_CHOICES = 1024
_JSON_KEYS = ("json", "json_object")
# Options of structured_outputs that would change what is asked for, with the value that does not.
_NEUTRAL_OPTIONS = {
    "disable_additional_properties": False,
    "disable_any_whitespace": False,
    "disable_fallback": None,  # there is none
    "whitespace_pattern": None,
}


class ResponseFormat(Wire):
    """OpenAI's response_format. A schema is kept whether or not it is `strict`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if self.type != "json_schema":
            if self.json_schema is not None:
                raise ValueError(f"json_schema: the type is {self.type}: make it json_schema")
        elif not isinstance((self.json_schema or {}).get("schema"), dict):
            raise ValueError("json_schema.schema must be a JSON schema, as an object")
        return self

    @property
    def grammar(self) -> Grammar | None:
        """Of the answer; None for text."""
        if self.type == "text":
            return None
        schema = {"type": "object"} if self.json_schema is None else self.json_schema["schema"]
        return grammar.of_schema(schema, "response_format")


class Structure(Wire):
    """A part of a text: `begin`, JSON of the schema, `end`."""

    begin: Annotated[Text, Field(min_length=1)]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    end: Text


class StructuralTag(Wire):
    """vLLM's structural tags in their first form: a text may have any of the structures, and each
    begins where the text has one of the triggers."""

    type: Literal["structural_tag"] = "structural_tag"
    structures: Annotated[list[Structure], Field(min_length=1, max_length=MAX_CHOICES)]
    triggers: Annotated[list[Annotated[Text, Field(min_length=1)]], Field(min_length=1)]

    def grammar(self, field: str) -> Grammar:
        tags = []
        for one in self.structures:
            trigger = next((t for t in self.triggers if one.begin.startswith(t)), None)
            if trigger is None:
                raise invalid(f"{field}: {one.begin!r} begins with none of the triggers", field)
            tags.append((trigger, one.begin, one.schema_, one.end))
        return grammar.of_tags(tags, field)


class StructuredOutputs(Wire):
    """vLLM's structured_outputs, without what `response_format` says: exactly one is given."""

    regex: Annotated[Text, Field(min_length=1)] | None = None
    choice: (
        Annotated[
            list[Annotated[Text, Field(min_length=1)]], Field(min_length=1, max_length=MAX_CHOICES)
        ]
        | None
    ) = None
    grammar: Annotated[Text, Field(min_length=1)] | None = None
    structural_tag: Annotated[Text, Field(min_length=1)] | None = None  # JSON

    @property
    def as_grammar(self) -> Grammar | None:
        if self.regex is not None:
            return grammar.of_regex(self.regex, "structured_outputs.regex")
        if self.choice is not None:
            return grammar.of_choice(self.choice, "structured_outputs.choice")
        if self.grammar is not None:
            return grammar.of_grammar(self.grammar, "structured_outputs.grammar")
        if self.structural_tag is not None:
            field = "structured_outputs.structural_tag"
            return _tag_of(self.structural_tag, field).grammar(field)
        return None


def merge_structured(data: dict[str, Any]) -> dict[str, Any]:
    """A request with `response_format` and `structured_outputs` alone, of which at most one asks
    for a form. Raises InvalidRequest for two."""
    asked: dict[str, Any] = {}  # the field as it was named: key and value
    data = dict(data)
    for name, key in FORMER_NAMES.items():
        value = data.pop(name, None)
        if value is None:
            continue
        if value in ("", []):
            raise invalid(f"{name} is empty: say the form of the answer, or remove it", name)
        asked[name] = (key, value)
    given = data.pop("structured_outputs", None)
    options = given.to_dict() if isinstance(given, StructuredOutputs) else given
    if isinstance(options, dict):
        for key, value in _without_neutral(options).items():
            asked[f"structured_outputs.{key}"] = (key, value)
    elif not (options is None or options in ("", [])):
        data["structured_outputs"] = options  # its type is refused
    form = data.get("response_format")
    if isinstance(form, dict) and form.get("type") == "structural_tag":
        asked["response_format"] = ("structural_tag", data.pop("response_format"))
        form = None
    kind = form.get("type") if isinstance(form, dict) else getattr(form, "type", None)
    names = [*asked, *(["response_format"] if kind not in (None, "text") else [])]
    if len(names) > 1:
        raise invalid(
            f"{' and '.join(names)} exclude each other: an answer has one form: set only one",
            names[0],
        )
    for name, (key, value) in asked.items():
        if key in _JSON_KEYS:
            data["response_format"] = _json_form(name, key, value)
        else:
            if key == "structural_tag" and isinstance(value, dict):
                value = json.dumps(value, ensure_ascii=False)
            data["structured_outputs"] = {key: value}
    return data


def _without_neutral(options: dict[str, Any]) -> dict[str, Any]:
    """The options that ask for a form. Raises InvalidRequest for one that changes it."""
    kept = {}
    for key, value in options.items():
        if key in _NEUTRAL_OPTIONS:
            if value not in (None, _NEUTRAL_OPTIONS[key]):
                path = f"structured_outputs.{key}"
                raise invalid(
                    f"{path} is not supported: JSON has up to {grammar.MAX_SPACES} characters of "
                    "white space between its tokens, and the properties of the schema: remove it",
                    path,
                )
        elif value is not None and not (key == "json_object" and value is False):
            kept[key] = value
    return kept


def _tag_of(text: str, field: str) -> StructuralTag:
    """Raises InvalidRequest, also for other forms of structural tags."""
    try:
        return StructuralTag.model_validate_json(text)
    except ValidationError as error:
        fault = to_invalid_request(error, StructuralTag)
        raise invalid(
            f"{field}: {fault.message}; it must be the JSON text of type, structures (each with "
            "begin, schema and end) and triggers: other forms are not supported",
            field,
        ) from None


def _json_form(name: str, key: str, value: Any) -> dict[str, Any]:
    if key == "json_object":
        if value is not True:
            raise invalid(f"{name}: must be true or false", name)
        return {"type": "json_object"}
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise invalid(f"{name}: the text is not JSON", name) from None
    if not isinstance(value, dict):
        raise invalid(f"{name}: must be a JSON schema, as an object or its text", name)
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": value}}
