"""The operations of the live page: its files and its figures."""

from __future__ import annotations

from typing import Any

from jobs.gateway.openapi.operation import JSON, Family, Operation, Schema, object_of, of_path
from jobs.gateway.overview import COUNTS
from jobs.gateway.routes.live import FILES

TEXT: Schema = {"type": "string"}
TEXT_OR_NULL: Schema = {"type": ["string", "null"]}
NUMBER: Schema = {"type": "number"}
INTEGER: Schema = {"type": "integer"}
INTEGER_OR_NULL: Schema = {"type": ["integer", "null"]}


def _list(**properties: Any) -> Schema:
    return {"type": "array", "items": object_of(properties)}


JOBS = _list(
    id=TEXT,
    model=TEXT,
    state={"enum": ["started", "finished", "failed", "cancelled"]},
    run=TEXT_OR_NULL,
    chat={"type": "boolean"},
    age_s=NUMBER,
    code=TEXT_OR_NULL,
)
STATUS = object_of(
    {
        "at": {**NUMBER, "description": "When it was read, in seconds since the epoch."},
        "tenant": TEXT_OR_NULL,
        "workers": _list(
            name=TEXT,
            host=TEXT_OR_NULL,
            device=TEXT,
            models=_list(name=TEXT, state=TEXT),
            state={"enum": ["running", "paused", "loading"]},
            reason=TEXT,
            running=INTEGER,
            waiting=INTEGER,
            tokens_per_second=NUMBER,
            memory={**INTEGER, "description": "Bytes of weights and caches."},
            heartbeat_s={"type": ["number", "null"]},
        ),
        "queues": _list(
            name=TEXT,
            model=TEXT,
            **dict.fromkeys(COUNTS, INTEGER),
            oldest_s=NUMBER,
            workers=INTEGER,
        ),
        "models": _list(id=TEXT, root=TEXT, max_model_len=INTEGER_OR_NULL, workers=INTEGER),
        "runs": _list(
            run=TEXT,
            state=TEXT,
            rows=INTEGER_OR_NULL,
            failed=INTEGER,
            expected=INTEGER_OR_NULL,
            unwritten=INTEGER,
        ),
        "jobs": object_of({"running": JOBS, "ended": JOBS}),
        "rows": {"anyOf": [object_of({"waiting": INTEGER, "oldest_s": NUMBER}), {"type": "null"}]},
        "notices": {"type": "array", "items": TEXT},
    }
)

FAMILY = Family(
    "live page",
    {
        ("GET", "/status"): Operation(
            "getStatus",
            "The figures of the live page, as far as the tenant may see them.",
            {JSON: STATUS},
        ),
        ("GET", "/page/{file}"): Operation(
            "getPageFile",
            "A file of the live page.",
            {media.partition(";")[0]: TEXT for media in FILES.values()},
            errors=frozenset({404}),
            parameters=[of_path("file", "Its name.")],
            key=False,
        ),
    },
)
