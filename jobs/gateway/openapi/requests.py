"""The schemas of requests: the wire type's fields, with those that it takes in other forms, ignores
or refuses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jobs.api.request import TEMPLATE_INPUTS, TOOL_NAME, ChatRequest
from jobs.api.structured import FORMER_NAMES, MAX_CHOICES
from jobs.api.unsupported_fields import (
    IGNORED_FIELDS,
    IGNORED_IN_CALL,
    IGNORED_IN_FUNCTION,
    IGNORED_IN_MESSAGE,
    IGNORED_IN_PART,
    IGNORED_IN_TOOL,
    REFUSED_FIELDS,
)
from jobs.gateway.completions.asked import (
    DEFAULT_TOKENS,
    MAX_PROMPTS,
    MOST_LOGPROBS,
    NOT_OF_COMPLETIONS,
)
from jobs.gateway.openapi.operation import Schema, object_of, schemas_of
from jobs.keys import JOB_ID, RUN_ID, SESSION_ID

EMPTY: Schema = {"enum": [None, "", [], {}]}  # of a field that is dropped, whatever its name
IGNORED = {"description": "Ignored."}
JOB_NAMES = {"id": JOB_ID, "run": RUN_ID, "session": SESSION_ID}


def request_schemas() -> dict[str, Schema]:
    """`ChatRequest`, `CompletionRequest`, and all that they contain."""
    schemas = schemas_of(ChatRequest)
    _take_other_forms(schemas)
    chat = schemas["ChatRequest"]
    chat["description"] = "docs/requests.md describes the fields."
    chat["properties"] |= {**_former_names(), **_others(), "background": _background()}
    schemas["CompletionRequest"] = _completion_request(chat)
    return schemas


def _others() -> dict[str, Schema]:
    """The fields of other APIs that are ignored or refused."""
    ignored = {
        name: {"description": "Ignored: it has no effect on a local text model."}
        for name in IGNORED_FIELDS
    }
    refused = {}
    for name, (neutral, hint) in REFUSED_FIELDS.items():
        values = [None] if neutral is None else [neutral, None]
        refused[name] = {"description": f"Not supported: {hint}.", "enum": values}
    return {**ignored, **refused}


def _former_names() -> dict[str, Schema]:
    of_key: dict[str, Schema] = {
        "json": {"type": ["object", "string", "null"], "minLength": 1},
        "regex": {"type": ["string", "null"], "minLength": 1},
        "choice": {
            "type": ["array", "null"],
            "items": {"type": "string", "minLength": 1},
            "minItems": 1,
            "maxItems": MAX_CHOICES,
        },
        "grammar": {"type": ["string", "null"], "minLength": 1},
        "structural_tag": {"type": ["object", "string", "null"], "minLength": 1},
    }
    former = {
        name: {**of_key[key], "deprecated": True, "description": f"Now structured_outputs.{key}."}
        for name, key in FORMER_NAMES.items()
    }
    request_id = {
        "type": ["string", "null"],
        "pattern": _whole(JOB_ID.pattern),
        "description": "Another name of job.id.",
    }
    return {**former, "request_id": request_id}


def _background() -> Schema:
    return {
        "type": ["boolean", "null"],
        "default": False,
        "description": "true: the job goes on if the client goes away. An extension.",
    }


def _take_other_forms(schemas: dict[str, Schema]) -> None:
    """Say of parts of a request what is taken beside the fields of their types."""
    request = schemas["ChatRequest"]["properties"]
    _of_type(request["logit_bias"], "object")["propertyNames"] = {"pattern": "^[0-9]{1,10}$"}
    _of_type(request["allowed_token_ids"], "array")["minItems"] = 1
    _of_type(request["stop"], "string")["minLength"] = 1
    _of_type(request["stop"], "array")["items"]["minLength"] = 1
    for name, pattern in JOB_NAMES.items():
        of_name = _of_type(schemas["JobOptions"]["properties"][name], "string")
        of_name["pattern"] = _whole(pattern.pattern)
    schemas["FunctionDefinition"]["properties"]["name"]["pattern"] = _whole(TOOL_NAME.pattern)
    schemas["StructuredOutputs"]["properties"] |= {
        "json": {"type": ["object", "string", "null"]},
        "json_object": {"type": ["boolean", "null"]},
    }
    schemas["StreamOptions"]["properties"] |= {
        "include_obfuscation": IGNORED,
        "continuous_usage_stats": {"enum": [False, None]},
    }
    message = schemas["Message"]
    parts = _of_type(message["properties"]["content"], "array")
    parts["items"] = {
        "anyOf": [parts["items"], {"type": "string"}, _refusal_part()],
    }
    message["properties"] |= {
        "reasoning": {"type": ["string", "null"]},
        "refusal": {"type": ["string", "null"]},
    }
    schemas["SentFunctionCall"]["properties"]["arguments"] = {"type": ["string", "object", "null"]}
    schemas["SentToolCall"]["properties"]["type"] = {"enum": ["function", None]}
    schemas["SentToolCall"]["properties"]["index"] = IGNORED
    for name, ignored, others in (
        ("Message", IGNORED_IN_MESSAGE, EMPTY),
        ("TextPart", IGNORED_IN_PART, EMPTY),
        ("SentToolCall", IGNORED_IN_CALL, EMPTY),
        ("SentFunctionCall", IGNORED_IN_FUNCTION, EMPTY),
        ("Tool", IGNORED_IN_TOOL, False),
    ):
        schemas[name]["properties"] |= dict.fromkeys(sorted(ignored), IGNORED)
        schemas[name]["additionalProperties"] = others


def _refusal_part() -> Schema:
    properties = {"type": {"const": "refusal"}, "refusal": {"type": "string"}}
    return object_of(properties, additionalProperties=EMPTY)


def _completion_request(chat: Schema) -> Schema:
    """That of /v1/completions: what a prompt without a chat template has of a chat's fields."""
    without = {*NOT_OF_COMPLETIONS, *TEMPLATE_INPUTS, "top_logprobs", "tool_choice", "suffix"}
    kept = {name: one for name, one in chat["properties"].items() if name not in without}
    ids: Schema = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
    several: Schema = {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS}
    prompt = {
        "anyOf": [
            {"type": "string"},
            ids,
            {**several, "items": {"anyOf": [{"type": "string"}, ids]}},
        ],
        "description": "A text, token ids, or a list of either.",
    }
    own: dict[str, Schema] = {
        "prompt": prompt,
        "echo": {"type": ["boolean", "null"], "default": False},
        "stream": {"type": ["boolean", "null"], "default": False},
        "logprobs": _integer(MOST_LOGPROBS, None),
        "max_tokens": _integer(None, DEFAULT_TOKENS),
        "suffix": {"enum": [None, ""], "description": "Not supported: put it into the prompt."},
    }
    return {
        "type": "object",
        "title": "CompletionRequest",
        "description": "docs/http.md describes the fields.",
        "properties": {**kept, **own},
        "required": ["model", "prompt"],
        "additionalProperties": False,
    }


def _integer(most: int | None, default: int | None) -> Schema:
    limit = {} if most is None else {"maximum": most}
    return {"type": ["integer", "null"], "minimum": 0, **limit, "default": default}


def _of_type(schema: Schema, kind: str) -> dict[str, Any]:
    """The schema of this type among those of a field that may be null."""
    options: Iterable[dict[str, Any]] = schema.get("anyOf", [schema])
    return next(one for one in options if one.get("type") == kind)


def _whole(pattern: str) -> str:
    """A pattern that is matched with the whole text."""
    return f"^(?:{pattern})$"
