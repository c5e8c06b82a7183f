"""The operations of responses. OpenAI's own document has the items and events in full."""

from __future__ import annotations

from jobs.gateway.openapi.operation import (
    EVENTS,
    JSON,
    OF_JOBS,
    Family,
    Operation,
    Schema,
    events_of,
    object_of,
    of_header,
    of_page,
    of_path,
    of_query,
    ref,
)
from jobs.gateway.responses.asked import PREFIX
from jobs.gateway.routes.responses import MOST_ITEMS, PATH
from jobs.keys import JOB_ID

ERRORS = frozenset(OF_JOBS)
ID = of_path("id", "Of the response, resp_<job>.")
RESUME = of_header("Last-Event-ID", "Number of the last event that the client has seen.")
TEXT: Schema = {"type": "string"}
TEXT_OR_NULL: Schema = {"type": ["string", "null"]}
FLAG_OR_NULL: Schema = {"type": ["boolean", "null"]}
OBJECT_OR_NULL: Schema = {"type": ["object", "null"]}
ITEMS: Schema = {"type": "array", "items": {"type": "object"}}

REQUEST = object_of(
    {
        "model": TEXT,
        "input": {"anyOf": [TEXT, {**ITEMS, "minItems": 1}]},
        "instructions": TEXT_OR_NULL,
        "previous_response_id": {**TEXT_OR_NULL, "pattern": f"^{PREFIX}{JOB_ID.pattern}$"},
        "tools": {
            **ITEMS,
            "type": ["array", "null"],
            "description": "Others than functions are skipped.",
        },
        "text": OBJECT_OR_NULL,
        "reasoning": OBJECT_OR_NULL,
        "max_output_tokens": {"type": ["integer", "null"], "minimum": 1},
        "truncation": {"enum": ["auto", "disabled", None]},
        "include": {"type": ["array", "null"]},
        "store": FLAG_OR_NULL,
        "background": FLAG_OR_NULL,
        "stream": FLAG_OR_NULL,
    },
    *("instructions", "previous_response_id", "tools", "text", "reasoning", "max_output_tokens"),
    *("truncation", "include", "store", "background", "stream"),
    description="Further fields are those of a chat.",
)
RESPONSE = object_of(
    {
        "id": TEXT,
        "object": {"const": "response"},
        "created_at": {"type": "integer"},
        "status": {
            "enum": ["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
        },
        "model": TEXT,
        "output": ITEMS,
        "error": OBJECT_OR_NULL,
        "incomplete_details": OBJECT_OR_NULL,
        "usage": OBJECT_OR_NULL,
    }
)
EVENT = object_of({"type": TEXT, "sequence_number": {"type": "integer"}})
INPUT_ITEMS = object_of(
    {
        "object": {"const": "list"},
        "data": ITEMS,
        "first_id": TEXT,
        "last_id": TEXT,
        "has_more": {"type": "boolean"},
    }
)
DELETED = object_of({"id": TEXT, "object": {"const": "response"}, "deleted": {"const": True}})
STREAM = events_of("ResponseEvent")

FAMILY = Family(
    "responses",
    {
        ("POST", PATH): Operation(
            "createResponse",
            "Answer an input: one job, in the form of OpenAI's Responses API.",
            {JSON: ref("Response"), EVENTS: STREAM},
            {JSON: ref("ResponseRequest")},
            ERRORS,
        ),
        ("GET", PATH + "/{id}"): Operation(
            "getResponse",
            "A response as it is now, or its events.",
            {JSON: ref("Response"), EVENTS: STREAM},
            errors=ERRORS,
            parameters=[
                ID,
                of_query("stream", "Whether the events are asked for.", type="boolean"),
                of_query(
                    "starting_after", "The last event that is left out.", type="integer", minimum=0
                ),
                RESUME,
            ],
        ),
        ("DELETE", PATH + "/{id}"): Operation(
            "deleteResponse",
            "Delete a response and its job.",
            {JSON: DELETED},
            errors=ERRORS,
            parameters=[ID],
        ),
        ("POST", PATH + "/{id}/cancel"): Operation(
            "cancelResponse",
            "Stop a response.",
            {JSON: ref("Response")},
            errors=ERRORS,
            parameters=[ID],
        ),
        ("GET", PATH + "/{id}/input_items"): Operation(
            "listInputItems",
            "The items of its own input.",
            {JSON: INPUT_ITEMS},
            errors=ERRORS,
            parameters=[ID, *of_page(MOST_ITEMS, minLength=1)],
        ),
    },
    {"ResponseRequest": REQUEST, "Response": RESPONSE, "ResponseEvent": EVENT},
)
