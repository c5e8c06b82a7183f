"""/v1/files: files of tenants, such as the input and the output of batches."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any, BinaryIO

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from jobs.api.wire import describe
from jobs.errors import invalid
from jobs.gateway.endpoints import route
from jobs.gateway.failures import JsonReply
from jobs.gateway.files.stored import DATA, FileStore
from jobs.gateway.files.upload import read_upload
from jobs.gateway.folders import on_disk
from jobs.gateway.gateway import Gateway
from jobs.gateway.ids import FILE
from jobs.gateway.paging import list_dict, natural, read_page
from jobs.gateway.tenants import Tenant

PATH = "/v1/files"
PURPOSES = ("assistants", "batch", "fine-tune", "user_data", "vision")  # only `batch` is read here
MOST_LISTED = 10_000
CONTENT_BYTES = 2**18  # at once
DAY = 24 * 3600
KEPT_SECONDS = 30 * DAY  # a file for a batch that asks for no other time
LEAST_SECONDS, MOST_SECONDS = 3600, 30 * DAY  # that a file may ask for


def routes(gateway: Gateway) -> list[Route]:
    files = _Files(gateway)
    return [
        route(gateway, "POST", PATH, files.create),
        route(gateway, "GET", PATH, files.list),
        route(gateway, "GET", PATH + "/{id}", files.get),
        route(gateway, "DELETE", PATH + "/{id}", files.delete),
        route(gateway, "GET", PATH + "/{id}/content", files.content),
    ]


class _Files:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def create(self, request: Request, tenant: Tenant) -> ASGIApp:
        settings, store = self._gateway.settings, self._store(tenant)
        await self._gateway.check_results()
        await on_disk(store.check_room, 0, tenant.files_bytes)
        unfinished = store.unfinished()
        path = await on_disk(unfinished.__enter__)
        try:
            upload = await read_upload(
                request, path / DATA, settings.max_file, settings.read_seconds
            )
            fields = dict(upload.fields)
            purpose = _purpose(fields.pop("purpose", None))
            seconds = _seconds(fields, KEPT_SECONDS if purpose == "batch" else None)
            if fields:
                name = next(iter(fields))
                raise invalid(f"{describe(name)} is no field of an upload: remove it", name[:100])
            file = await on_disk(
                store.add, path, upload.filename or "", purpose, seconds, tenant.files_bytes
            )
        finally:
            await on_disk(unfinished.__exit__, None, None, None)
        return JsonReply(file.to_dict())

    async def list(self, request: Request, tenant: Tenant) -> ASGIApp:
        page = read_page(request, FILE, MOST_LISTED, MOST_LISTED)
        purpose = request.query_params.get("purpose")
        files, has_more = await on_disk(self._store(tenant).listed, page, purpose)
        return JsonReply(list_dict([file.to_dict() for file in files], has_more))

    async def get(self, request: Request, tenant: Tenant) -> ASGIApp:
        file = await on_disk(self._store(tenant).get, request.path_params["id"])
        return JsonReply(file.to_dict())

    async def delete(self, request: Request, tenant: Tenant) -> ASGIApp:
        id = request.path_params["id"]
        await on_disk(self._store(tenant).delete, id)
        return JsonReply({"id": id, "object": "file", "deleted": True})

    async def content(self, request: Request, tenant: Tenant) -> ASGIApp:
        opened = await on_disk(self._store(tenant).open, request.path_params["id"])
        size = os.fstat(opened.fileno()).st_size
        headers = {"content-length": str(size), "x-content-type-options": "nosniff"}
        return StreamingResponse(
            _chunks(opened), headers=headers, media_type="application/octet-stream"
        )

    def _store(self, tenant: Tenant) -> FileStore:
        return FileStore(self._gateway.settings.results, tenant.name)


async def _chunks(file: BinaryIO) -> AsyncIterator[bytes]:
    with file:
        while chunk := await on_disk(file.read, CONTENT_BYTES):
            yield chunk


def _purpose(value: str | None) -> str:
    if value not in PURPOSES:
        raise invalid(
            f"purpose: expected one of {', '.join(PURPOSES)}, got {describe(value)}", "purpose"
        )
    return value


def _seconds(fields: dict[str, str], default: int | None) -> int | None:
    """Remove `expires_after`, as clients send it in a form. Raises InvalidRequest."""
    given: dict[str, Any] = {
        name: fields.pop(f"expires_after[{name}]")
        for name in ("anchor", "seconds")
        if f"expires_after[{name}]" in fields
    }
    if not given:
        return default
    if (seconds := natural(given.get("seconds", ""))) is not None:
        given["seconds"] = seconds
    return read_expiry(given)


def read_expiry(value: Any, name: str = "expires_after") -> int:
    """The seconds of an `expires_after`. Raises InvalidRequest."""
    seconds = value.get("seconds") if isinstance(value, dict) else None
    if (
        not isinstance(value, dict)
        or value.keys() != {"anchor", "seconds"}
        or value["anchor"] != "created_at"
        or type(seconds) is not int
        or not LEAST_SECONDS <= seconds <= MOST_SECONDS
    ):
        raise invalid(
            f'{name}: expected {{"anchor": "created_at", "seconds": N}}, N from {LEAST_SECONDS} to '
            f"{MOST_SECONDS}, got {describe(value)}",
            name,
        )
    return seconds
