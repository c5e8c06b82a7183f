"""/v1/batches: runs over the lines of an uploaded file."""

from __future__ import annotations

import re
import time
from typing import Any

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from jobs.api.wire import describe
from jobs.errors import invalid
from jobs.gateway.batches.forms import ENDPOINTS
from jobs.gateway.batches.stored import (
    CANCELLING,
    ENDED,
    FINALIZING,
    Asked,
    BatchStore,
    StoredBatch,
)
from jobs.gateway.bodies import read_json
from jobs.gateway.endpoints import route
from jobs.gateway.failures import JsonReply
from jobs.gateway.files.stored import FileStore, no_file
from jobs.gateway.folders import on_disk
from jobs.gateway.gateway import Gateway
from jobs.gateway.ids import BATCH
from jobs.gateway.paging import list_dict, read_page
from jobs.gateway.routes.files import KEPT_SECONDS, read_expiry
from jobs.gateway.tenants import Tenant

PATH = "/v1/batches"
FIELDS = (
    "input_file_id",
    "endpoint",
    "completion_window",
    "metadata",
    "output_expires_after",
)
DEFAULT_LISTED, MOST_LISTED = 20, 100
WINDOW = re.compile("([1-9][0-9]{0,5})([smhd])")
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600}
MOST_WINDOW = 30 * 24 * 3600
MOST_PAIRS, MOST_KEY, MOST_VALUE = 16, 64, 512  # of metadata


def routes(gateway: Gateway) -> list[Route]:
    batches = _Batches(gateway)
    return [
        route(gateway, "POST", PATH, batches.create),
        route(gateway, "GET", PATH, batches.list),
        route(gateway, "GET", PATH + "/{id}", batches.get),
        route(gateway, "POST", PATH + "/{id}/cancel", batches.cancel),
    ]


class _Batches:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def create(self, request: Request, tenant: Tenant) -> ASGIApp:
        settings = self._gateway.settings
        body = await read_json(request, settings.max_body, settings.read_seconds)
        asked = read_asked(body)
        await self._gateway.check_results()

        def add() -> dict[str, Any]:
            files = FileStore(settings.results, tenant.name)
            file = files.get(asked.input_file_id, "input_file_id")
            if file.purpose != "batch":
                raise invalid(
                    f"input_file_id: {file.id} has the purpose {file.purpose!r}, and a batch reads "
                    "files of the purpose 'batch': upload it as one",
                    "input_file_id",
                )
            try:
                batch = self._store(tenant).add(asked, files.content(file.id), tenant.batches)
            except FileNotFoundError:
                raise no_file(file.id, "input_file_id") from None
            return batch.to_dict()

        return JsonReply(await on_disk(add))

    async def list(self, request: Request, tenant: Tenant) -> ASGIApp:
        page = read_page(request, BATCH, DEFAULT_LISTED, MOST_LISTED)
        found, has_more = await on_disk(self._store(tenant).listed, page)
        return JsonReply(list_dict(found, has_more))

    async def get(self, request: Request, tenant: Tenant) -> ASGIApp:
        batch = await on_disk(self._store(tenant).get, request.path_params["id"])
        return JsonReply(await on_disk(batch.to_dict))

    async def cancel(self, request: Request, tenant: Tenant) -> ASGIApp:
        """Cancel a batch. One that is being cancelled, or was, is given as it is."""
        batch = await on_disk(self._store(tenant).get, request.path_params["id"])
        await on_disk(_cancel, batch)
        return JsonReply(await on_disk(batch.to_dict))

    def _store(self, tenant: Tenant) -> BatchStore:
        return BatchStore(self._gateway.settings.results, tenant.name)


def _cancel(batch: StoredBatch) -> None:
    """Raises InvalidRequest for a batch that ends, or has ended, otherwise."""
    found = batch.to_dict()
    status = found["status"]
    if status not in ("validating", "in_progress", "cancelling", "cancelled"):
        raise invalid(
            f"batch {batch.id} is {status}: only one that is validating or in_progress can be "
            "cancelled",
            "id",
        )
    if not (batch.has(ENDED) or batch.has(FINALIZING)):
        batch.note(CANCELLING)


def read_asked(body: dict[str, Any]) -> Asked:
    """What a request for a batch asks for. Raises InvalidRequest."""
    unknown = next((name for name in body if name not in FIELDS), None)
    if unknown is not None:
        known = ", ".join(FIELDS)
        raise invalid(f"unknown field {describe(unknown)}; a batch has {known}", unknown)
    for name in FIELDS[:3]:
        if not isinstance(body.get(name), str):
            raise invalid(f"{name}: expected a text, got {describe(body.get(name))}", name)
    if body["endpoint"] not in ENDPOINTS:
        raise invalid(
            f"endpoint: expected {' or '.join(ENDPOINTS)}, got {describe(body['endpoint'])}",
            "endpoint",
        )
    created = int(time.time())
    expiry = body.get("output_expires_after")
    return Asked(
        endpoint=body["endpoint"],
        input_file_id=body["input_file_id"],
        completion_window=body["completion_window"],
        created_at=created,
        expires_at=created + _window(body["completion_window"]),
        metadata=_metadata(body.get("metadata")),
        output_seconds=(
            KEPT_SECONDS if expiry is None else read_expiry(expiry, "output_expires_after")
        ),
    )


def _window(text: str) -> int:
    found = WINDOW.fullmatch(text)
    seconds = int(found[1]) * UNITS[found[2]] if found else 0
    if not (found and seconds <= MOST_WINDOW):
        raise invalid(
            "completion_window: expected a number with s, m, h or d, such as 24h, of at most 30d, "
            f"got {describe(text)}",
            "completion_window",
        )
    return seconds


def _metadata(value: Any) -> dict[str, str] | None:
    if value is None:
        return None
    if (
        not isinstance(value, dict)
        or len(value) > MOST_PAIRS
        or any(len(name) > MOST_KEY for name in value)
        or any(not isinstance(one, str) or len(one) > MOST_VALUE for one in value.values())
    ):
        raise invalid(
            f"metadata: expected an object of at most {MOST_PAIRS} texts of at most {MOST_VALUE} "
            f"characters, with names of at most {MOST_KEY}",
            "metadata",
        )
    return value
