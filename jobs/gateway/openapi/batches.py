"""The operations of batches."""

from __future__ import annotations

from jobs.gateway.batches.forms import ENDPOINTS
from jobs.gateway.ids import BATCH as BATCH_ID
from jobs.gateway.ids import pattern
from jobs.gateway.openapi.files import EXPIRES_AFTER
from jobs.gateway.openapi.operation import (
    JSON,
    OF_DISKS,
    Family,
    Operation,
    Schema,
    list_of,
    object_of,
    of_page,
    of_path,
    ref,
)
from jobs.gateway.routes.batches import MOST_KEY, MOST_LISTED, MOST_PAIRS, MOST_VALUE, PATH, WINDOW

ID = of_path("id", "Of a batch.")
TEXT: Schema = {"type": "string"}
TEXT_OR_NULL: Schema = {"type": ["string", "null"]}
INTEGER: Schema = {"type": "integer"}
TIME: Schema = {"type": ["integer", "null"]}
ERRORS = frozenset({404, *OF_DISKS})
STATUSES = [
    "validating",
    "in_progress",
    "finalizing",
    "completed",
    "failed",
    "expired",
    "cancelling",
    "cancelled",
]
METADATA: Schema = {
    "type": ["object", "null"],
    "maxProperties": MOST_PAIRS,
    "propertyNames": {"maxLength": MOST_KEY},
    "additionalProperties": {"type": "string", "maxLength": MOST_VALUE},
}

CREATE = object_of(
    {
        "input_file_id": TEXT,
        "endpoint": {"enum": list(ENDPOINTS)},
        "completion_window": {
            "type": "string",
            "pattern": f"^{WINDOW.pattern}$",
            "description": "Such as 24h, and at most 30d.",
        },
        "metadata": METADATA,
        "output_expires_after": {"anyOf": [EXPIRES_AFTER, {"type": "null"}]},
    },
    "metadata",
    "output_expires_after",
    additionalProperties=False,
)
FAULT = object_of(
    {
        "code": TEXT,
        "message": TEXT,
        "param": TEXT_OR_NULL,
        "line": {"type": ["integer", "null"], "description": "Of the input, from 1."},
    }
)
USAGE = object_of(
    {
        "input_tokens": INTEGER,
        "input_tokens_details": object_of({"cached_tokens": INTEGER}),
        "output_tokens": INTEGER,
        "output_tokens_details": object_of({"reasoning_tokens": INTEGER}),
        "total_tokens": INTEGER,
    }
)
BATCH = object_of(
    {
        "id": TEXT,
        "object": {"const": "batch"},
        "endpoint": {"enum": list(ENDPOINTS)},
        "model": TEXT_OR_NULL,
        "errors": {
            "anyOf": [
                object_of({"object": {"const": "list"}, "data": {"type": "array", "items": FAULT}}),
                {"type": "null"},
            ]
        },
        "input_file_id": TEXT,
        "completion_window": TEXT,
        "status": {"enum": STATUSES},
        "output_file_id": TEXT_OR_NULL,
        "error_file_id": TEXT_OR_NULL,
        "created_at": INTEGER,
        "expires_at": INTEGER,
        **{f"{name}_at": TIME for name in STATUSES if name != "validating"},
        "request_counts": object_of(dict.fromkeys(("total", "completed", "failed"), INTEGER)),
        "usage": {"anyOf": [USAGE, {"type": "null"}]},
        "metadata": METADATA,
    }
)

FAMILY = Family(
    "batches",
    {
        ("POST", PATH): Operation(
            "createBatch",
            "Run the lines of a file.",
            {JSON: ref("Batch")},
            {JSON: CREATE},
            ERRORS,
        ),
        ("GET", PATH): Operation(
            "listBatches",
            "The batches of the tenant.",
            {JSON: list_of("Batch")},
            errors=frozenset({400, *OF_DISKS}),
            parameters=of_page(MOST_LISTED, pattern=pattern(BATCH_ID)),
        ),
        ("GET", PATH + "/{id}"): Operation(
            "getBatch", "One of them.", {JSON: ref("Batch")}, errors=ERRORS, parameters=[ID]
        ),
        ("POST", PATH + "/{id}/cancel"): Operation(
            "cancelBatch",
            "End it.",
            {JSON: ref("Batch")},
            errors=frozenset({400, *ERRORS}),
            parameters=[ID],
        ),
    },
    {"Batch": BATCH},
)
