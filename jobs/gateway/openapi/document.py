"""The OpenAPI document of all families, and its route. It needs no key: it is the same for all."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jobs.gateway.failures import JsonReply
from jobs.gateway.gateway import Gateway
from jobs.gateway.openapi import about, batches, files, generation, live, responses, tokens
from jobs.gateway.openapi.operation import error_responses, object_of

FAMILIES = (
    about.FAMILY,
    generation.FAMILY,
    responses.FAMILY,
    files.FAMILY,
    tokens.FAMILY,
    live.FAMILY,
    batches.FAMILY,
)

TEXT_OR_NULL = {"type": ["string", "null"]}
ERROR = object_of(
    {
        "error": object_of(
            {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {**TEXT_OR_NULL, "description": "The field at fault."},
                "code": {**TEXT_OR_NULL, "description": "docs/errors.md has the codes."},
            }
        )
    }
)
HEADERS = {
    "x-request-id": "The id of the job, or one of the reply's own.",
    "x-should-retry": "false: the same request would fail again.",
    "retry-after": "Seconds after which the client may try again.",
}


@cache
def document() -> dict[str, Any]:
    """All operations, in the form of OpenAPI 3.1."""
    paths: dict[str, Any] = {}
    schemas: dict[str, Any] = {"Error": ERROR}
    for family in FAMILIES:
        for (method, path), operation in family.operations.items():
            paths.setdefault(path, {})[method.lower()] = operation.to_dict(family.tag)
        schemas |= family.schemas
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "chatjobs",
            "version": version("chatjobs"),
            "description": "OpenAI's API over the queue of chatjobs: docs/http.md.",
        },
        "servers": [{"url": "/"}],
        "tags": [{"name": family.tag} for family in FAMILIES],
        "paths": dict(sorted(paths.items())),
        "components": {
            "schemas": dict(sorted(schemas.items())),
            "responses": error_responses(),
            "headers": {
                name: {"description": description, "schema": {"type": "string"}}
                for name, description in HEADERS.items()
            },
            "securitySchemes": {
                "key": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "A key of a tenant, if the gateway has keys.",
                }
            },
        },
    }


def routes(gateway: Gateway) -> list[Route]:
    async def get(request: Request) -> Response:
        return JsonReply(document())

    return [Route(about.PATH, get, methods=["GET"])]
