"""The operations that say what is served: models, health, this document."""

from __future__ import annotations

from jobs.gateway.openapi.operation import JSON, Family, Operation, Schema, object_of, of_path, ref

PATH = "/openapi.json"

MODEL = object_of(
    {
        "id": {"type": "string"},
        "object": {"const": "model"},
        "created": {"type": "integer", "description": "Always 0."},
        "owned_by": {"type": "string"},
        "root": {"type": "string", "description": "The model's own name, where id is an alias."},
        "max_model_len": {"type": ["integer", "null"], "description": "Tokens of a sequence."},
    }
)
TEXT: Schema = {"type": "string"}
HTML = "text/html"

FAMILY = Family(
    "about",
    {
        ("GET", "/v1/models"): Operation(
            "listModels",
            "The names that running workers serve or load, aliases included.",
            {
                JSON: object_of(
                    {
                        "object": {"const": "list"},
                        "data": {"type": "array", "items": ref("Model")},
                    }
                )
            },
        ),
        ("GET", "/v1/models/{id}"): Operation(
            "getModel",
            "One of these names, which may have slashes.",
            {JSON: ref("Model")},
            errors=frozenset({404}),
            parameters=[of_path("id", "A name of a model.")],
        ),
        ("GET", "/health"): Operation(
            "getHealth",
            "Whether Redis answers, and the number of workers.",
            {JSON: object_of({"status": {"const": "ok"}, "workers": {"type": "integer"}})},
            key=False,
        ),
        ("GET", "/"): Operation(
            "getAbout",
            "Name and version, or the live page for a browser.",
            {JSON: object_of({"name": TEXT, "version": TEXT, "base_url": TEXT}), HTML: TEXT},
            key=False,
        ),
        ("GET", "/metrics"): Operation(
            "getMetrics", "Figures for Prometheus.", {"text/plain": TEXT}, key=False
        ),
        ("GET", PATH): Operation(
            "getDocument", "This document.", {JSON: {"type": "object"}}, key=False
        ),
    },
    {"Model": MODEL},
)
