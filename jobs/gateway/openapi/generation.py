"""The operations of chat completions and completions."""

from __future__ import annotations

from jobs.api.answer import ChatCompletion
from jobs.api.chunk import ChatChunk
from jobs.gateway.openapi.operation import (
    EVENTS,
    JSON,
    OF_JOBS,
    Family,
    Operation,
    Schema,
    events_of,
    json_of,
    object_of,
    of_header,
    of_path,
    ref,
    schemas_of,
)
from jobs.gateway.openapi.requests import request_schemas
from jobs.gateway.routes import chat, completions

ID = of_path("id", "Of the answer, chatcmpl-<job>, or of the job.")
RESUME = of_header(
    "Last-Event-ID",
    "The last event that the client has seen: the stream goes on after it.",
    pattern=f"^({chat.EVENT_ID.pattern})?$",
)
TOKEN_IDS = ("prompt_token_ids", "token_ids")  # of choices, with return_token_ids
ERRORS = frozenset(OF_JOBS)
UNTIL_DONE: list[Schema] = [json_of("Error"), {"const": "[DONE]"}]


def _answers() -> dict[str, Schema]:
    schemas = schemas_of(ChatCompletion, ChatChunk)
    chunk = schemas["ChatChunk"]
    del chunk["properties"]["cursor"]  # it is in the id of the event
    chunk["description"] = "A part of an answer. reset: discard all parts before it."
    return schemas


def _completions() -> dict[str, Schema]:
    numbers = {"type": "array", "items": {"type": ["number", "null"]}}
    logprobs = object_of(
        {
            "tokens": {"type": "array", "items": {"type": "string"}},
            "token_logprobs": numbers,
            "top_logprobs": {
                "type": "array",
                "items": {"type": ["object", "null"], "additionalProperties": {"type": "number"}},
            },
            "text_offset": {"type": "array", "items": {"type": "integer"}},
        }
    )
    choice: dict[str, Schema] = {
        "index": {"type": "integer"},
        "text": {"type": "string"},
        "logprobs": {"anyOf": [ref("CompletionLogprobs"), {"type": "null"}]},
        **{one: {"type": ["array", "null"], "items": {"type": "integer"}} for one in TOKEN_IDS},
    }
    head: dict[str, Schema] = {
        "id": {"type": "string"},
        "object": {"const": "text_completion"},
        "created": {"type": "integer"},
        "model": {"type": "string"},
    }
    ends = {"enum": ["stop", "length"]}
    goes_on = {"enum": ["stop", "length", None]}
    usage = {"anyOf": [ref("Usage"), {"type": "null"}]}
    return {
        "CompletionLogprobs": logprobs,
        "Completion": object_of(
            {
                **head,
                "choices": _list_of({**choice, "finish_reason": ends}),
                "usage": ref("Usage"),
                "system_fingerprint": {"type": ["string", "null"]},
            }
        ),
        "CompletionChunk": object_of(
            {**head, "choices": _list_of({**choice, "finish_reason": goes_on}), "usage": usage},
            "usage",
        ),
    }


def _list_of(properties: dict[str, Schema]) -> Schema:
    return {"type": "array", "items": object_of(properties, *TOKEN_IDS)}


FAMILY = Family(
    "generation",
    {
        ("POST", chat.PATH): Operation(
            "createChatCompletion",
            "Answer a conversation: one job, or the rest of the stream of Last-Event-ID.",
            {JSON: ref("ChatCompletion"), EVENTS: events_of("ChatChunk", *UNTIL_DONE)},
            {JSON: ref("ChatRequest")},
            ERRORS,
            [RESUME],
        ),
        ("GET", chat.PATH + "/{id}"): Operation(
            "getChatCompletion",
            "The answer of a job, once it has ended.",
            {JSON: ref("ChatCompletion")},
            errors=ERRORS,
            parameters=[ID],
        ),
        ("GET", chat.PATH + "/{id}/stream"): Operation(
            "streamChatCompletion",
            "The stream of a job, from its start or after Last-Event-ID.",
            {EVENTS: events_of("ChatChunk", *UNTIL_DONE)},
            errors=ERRORS,
            parameters=[ID, RESUME],
        ),
        ("POST", completions.PATH): Operation(
            "createCompletion",
            "Continue prompts, or score them: one job for each, without a chat template.",
            {JSON: ref("Completion"), EVENTS: events_of("CompletionChunk", *UNTIL_DONE)},
            {JSON: ref("CompletionRequest")},
            ERRORS,
        ),
    },
    {**_answers(), **_completions(), **request_schemas()},
)
