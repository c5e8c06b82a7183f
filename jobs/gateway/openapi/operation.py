"""`Operation`: one method of one path, and `Family`: those that belong together. Schemas are JSON
Schema, by hand or of a wire type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, models_json_schema

Schema = dict[str, Any]

JSON, EVENTS = "application/json", "text/event-stream"
REFERENCE = "#/components/schemas/{model}"
LIMITS = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
}
# By status, when a reply has OpenAI's error object; docs/http.md says more.
ERRORS: dict[int, str] = {
    400: "The request is invalid.",
    401: "The key is missing or wrong.",
    403: "The gateway has no keys, and the Host of the request is no name of this machine.",
    404: "No such response, model, job, file or batch.",
    408: "The request did not arrive in time.",
    409: "The job was cancelled, or a turn of its session has not ended.",
    413: "The body is too large.",
    415: "The body is not application/json, or an upload not multipart/form-data.",
    429: "The queue is full, or the tenant has too many requests, batches or bytes of files.",
    500: "A fault of the gateway or of a worker.",
    503: "Redis, the workers or the device can't take the request now.",
    504: "The job did not end in time.",
    507: "The disk of the results folder is full.",
}
OF_ALL = {403, 408, 500, 503}
OF_TENANTS = {401, 429}
OF_BODIES = {400, 413, 415}
OF_JOBS = {400, 404, 409, 504}
OF_DISKS = {507}
WITH_RETRY_AFTER = {429, 503}


@dataclass(frozen=True, slots=True)
class Operation:
    """What one method of one path takes and replies. `replies`: the schema of each media type of
    status 200. `errors`: statuses that not all operations have. `key`: it needs one, if there are
    any."""

    id: str
    summary: str
    replies: Mapping[str, Schema]
    body: Mapping[str, Schema] = field(default_factory=dict)  # by media type
    errors: frozenset[int] = frozenset()
    parameters: Sequence[Schema] = ()
    key: bool = True

    @property
    def statuses(self) -> list[int]:
        """Of its errors."""
        of_key = OF_TENANTS if self.key else set()
        of_body = OF_BODIES if self.body else set()
        return sorted(OF_ALL | of_key | of_body | self.errors)

    def to_dict(self, tag: str) -> dict[str, Any]:
        found: dict[str, Any] = {
            "operationId": self.id,
            "summary": self.summary,
            "tags": [tag],
            "security": [{"key": []}, {}] if self.key else [],
        }
        if self.parameters:
            found["parameters"] = list(self.parameters)
        if self.body:
            found["requestBody"] = {"required": True, "content": _content(self.body)}
        done = {
            "description": "Done.",
            "headers": _headers("x-request-id"),
            "content": _content(self.replies),
        }
        errors = {str(one): {"$ref": f"#/components/responses/{one}"} for one in self.statuses}
        return {**found, "responses": {"200": done, **errors}}


@dataclass(frozen=True, slots=True)
class Family:
    """Operations by method and path, and the schemas that they refer to by name."""

    tag: str
    operations: Mapping[tuple[str, str], Operation]
    schemas: Mapping[str, Schema] = field(default_factory=dict)


def error_responses() -> dict[str, Any]:
    """The reply of each status that is an error."""
    return {
        str(status): {
            "description": description,
            "headers": _headers(
                *("x-request-id", "x-should-retry"),
                *(["retry-after"] if status in WITH_RETRY_AFTER else []),
            ),
            "content": _content({JSON: ref("Error")}),
        }
        for status, description in ERRORS.items()
    }


def of_path(name: str, description: str) -> Schema:
    """A parameter in the path."""
    return {
        **{"name": name, "in": "path", "required": True, "description": description},
        "schema": {"type": "string", "minLength": 1},
    }


def of_header(name: str, description: str, **schema: Any) -> Schema:
    """An optional header of a request."""
    return {
        **{"name": name, "in": "header", "required": False, "description": description},
        "schema": {"type": "string", **schema},
    }


def of_query(name: str, description: str, **schema: Any) -> Schema:
    """An optional parameter of a query."""
    return {
        **{"name": name, "in": "query", "required": False, "description": description},
        "schema": schema or {"type": "string"},
    }


def of_page(most: int, **of_id: Any) -> list[Schema]:
    """The parameters of a list, of which a page has up to `most`. `of_id`: the schema of an id."""
    return [
        of_query("after", "The id of the last one of the page before.", type="string", **of_id),
        of_query("limit", "Of the page.", type="integer", minimum=1, maximum=most),
        of_query("order", "By creation.", enum=["asc", "desc"], default="desc"),
    ]


def list_of(name: str) -> Schema:
    """A page of a list."""
    end: Schema = {"type": ["string", "null"]}
    return object_of(
        {
            "object": {"const": "list"},
            "data": {"type": "array", "items": ref(name)},
            "first_id": end,
            "last_id": end,
            "has_more": {"type": "boolean"},
        }
    )


def ref(name: str) -> Schema:
    """A schema of the document by its name."""
    return {"$ref": REFERENCE.format(model=name)}


def events_of(name: str, *others: Schema) -> Schema:
    """A stream of server-sent events, as the fields of one event: OpenAPI 3.1 has no schema of a
    stream. `name`: of the schema of its data. `others`: what the data may be beside it."""
    text: Schema = {"type": "string"}
    return object_of(
        {"id": text, "event": text, "data": {**text, "anyOf": [json_of(name), *others]}},
        *("id", "event"),
        description="One of the events.",
    )


def json_of(name: str) -> Schema:
    """A text that is JSON of a schema."""
    return {"contentMediaType": JSON, "contentSchema": ref(name)}


def object_of(properties: Mapping[str, Schema], *optional: str, **more: Any) -> Schema:
    """An object that has all of these properties, but maybe not the optional ones."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": dict(properties), "required": required, **more}


def schemas_of(*models: type[BaseModel]) -> dict[str, Schema]:
    """The schemas of wire types and of all that they contain, by name. A field that has a default
    may be missing."""
    pairs = [(one, "validation") for one in models]
    _, found = models_json_schema(
        pairs,  # type: ignore[arg-type]
        ref_template=REFERENCE,
        schema_generator=_Plain,
    )
    schemas: dict[str, Schema] = _with_limits(found["$defs"])
    return schemas


class _Plain(GenerateJsonSchema):
    """Leaves out the titles of fields, and defaults that are null."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def default_schema(self, schema: Any) -> Schema:
        found = super().default_schema(schema)
        if found.get("default", ...) is None:
            del found["default"]
        return found


def _with_limits(schema: Any) -> Any:
    """The same with the limits of numbers that a function checks first, which pydantic leaves in
    its own terms."""
    if isinstance(schema, list):
        return [_with_limits(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("type") == "number":
        return {LIMITS.get(name, name): one for name, one in schema.items()}
    return {name: _with_limits(one) for name, one in schema.items()}


def _content(schemas: Mapping[str, Schema]) -> dict[str, Any]:
    return {media: {"schema": schema} for media, schema in schemas.items()}


def _headers(*names: str) -> dict[str, Any]:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}
