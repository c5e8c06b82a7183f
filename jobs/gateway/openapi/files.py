"""The operations of files."""

from __future__ import annotations

from dataclasses import fields

from jobs.gateway.files.stored import OUTPUT, StoredFile
from jobs.gateway.ids import FILE as FILE_ID
from jobs.gateway.ids import pattern
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
    of_query,
    ref,
)
from jobs.gateway.routes.files import LEAST_SECONDS, MOST_LISTED, MOST_SECONDS, PATH, PURPOSES

FORM, BYTES = "multipart/form-data", "application/octet-stream"
ID = of_path("id", "Of a file.")
PURPOSE: Schema = {"enum": list(PURPOSES)}
TEXT: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
ERRORS = frozenset({404, *OF_DISKS})

EXPIRES_AFTER = object_of(
    {
        "anchor": {"const": "created_at"},
        "seconds": {"type": "integer", "minimum": LEAST_SECONDS, "maximum": MOST_SECONDS},
    },
    additionalProperties=False,
)
# A form has texts only, so each field of it is one of the form.
OF_EXPIRES_AFTER = {
    f"expires_after[{name}]": schema for name, schema in EXPIRES_AFTER["properties"].items()
}
UPLOAD = object_of(
    {
        "file": {"type": "string", "contentMediaType": BYTES},
        "purpose": PURPOSE,
        **OF_EXPIRES_AFTER,
    },
    *OF_EXPIRES_AFTER,
    additionalProperties=False,
    dependentRequired={name: list(OF_EXPIRES_AFTER) for name in OF_EXPIRES_AFTER},
)
FILE = object_of(
    {
        **{one.name: TEXT for one in fields(StoredFile)},
        "bytes": INTEGER,
        "created_at": INTEGER,
        "expires_at": {"type": ["integer", "null"]},
        "purpose": {"enum": [*PURPOSES, OUTPUT]},
        "object": {"const": "file"},
        "status": {"const": "processed"},
        "status_details": {"type": "null"},
    }
)
DELETED = object_of({"id": TEXT, "object": {"const": "file"}, "deleted": {"const": True}})

FAMILY = Family(
    "files",
    {
        ("POST", PATH): Operation(
            "createFile",
            "Upload a file.",
            {JSON: ref("File")},
            {FORM: UPLOAD},
            frozenset(OF_DISKS),
        ),
        ("GET", PATH): Operation(
            "listFiles",
            "The files of the tenant.",
            {JSON: list_of("File")},
            errors=frozenset({400, *OF_DISKS}),
            parameters=[
                *of_page(MOST_LISTED, pattern=pattern(FILE_ID)),
                of_query("purpose", "Only files of this purpose."),
            ],
        ),
        ("GET", PATH + "/{id}"): Operation(
            "getFile", "One of them.", {JSON: ref("File")}, errors=ERRORS, parameters=[ID]
        ),
        ("DELETE", PATH + "/{id}"): Operation(
            "deleteFile", "Remove it.", {JSON: DELETED}, errors=ERRORS, parameters=[ID]
        ),
        ("GET", PATH + "/{id}/content"): Operation(
            "getFileContent", "Its bytes.", {BYTES: {}}, errors=ERRORS, parameters=[ID]
        ),
    },
    {"File": FILE},
)
