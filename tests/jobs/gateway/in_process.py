"""The application of a gateway in the process of the test, over a FakeWorker or a Redis server. The
OpenAPI document describes each reply."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
from starlette.types import ASGIApp

from jobs.client.aio import AsyncClient
from jobs.gateway.app import make_app
from jobs.gateway.gateway import Gateway
from jobs.gateway.settings import Settings
from jobs.testing import FakeWorker
from tests.jobs.conftest import publish_worker
from tests.jobs.gateway import described

SETTINGS: dict[str, Any] = {"redis_url": "", "results": Path("results")}


def send(
    worker: FakeWorker,
    method: str,
    path: str,
    *,
    settings: dict[str, Any] | None = None,
    **call: Any,
) -> httpx2.Response:
    """The reply to one request; the worker serves the model `any`."""
    publish_worker(worker.client(), "any")
    return ask(worker.async_client, method, path, settings=settings, **call)


def ask(
    client: Any, method: str, path: str, *, settings: dict[str, Any] | None = None, **call: Any
) -> httpx2.Response:
    """The reply to one request. `client`: makes the AsyncClient."""

    async def main() -> httpx2.Response:
        async with app_over(client, settings) as app, client_of(app) as http:
            return await http.request(method, path, **call)

    reply = asyncio.run(main())
    described.check(method, path, call, reply)
    return reply


def app_of(
    worker: FakeWorker, settings: dict[str, Any] | None = None
) -> AbstractAsyncContextManager[ASGIApp]:
    """The application over a worker, which serves the model `any`."""
    publish_worker(worker.client(), "any")
    return app_over(worker.async_client, settings)


def client_of(app: ASGIApp) -> httpx2.AsyncClient:
    """An HTTP client of an application."""
    transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
    return httpx2.AsyncClient(transport=transport, base_url="http://localhost", timeout=None)


@asynccontextmanager
async def app_over(client: Any, settings: dict[str, Any] | None = None) -> AsyncIterator[ASGIApp]:
    """The application over a client of Redis, which `client` makes."""
    connected: AsyncClient = client()
    async with connected:
        gateway = Gateway(Settings(**SETTINGS | (settings or {})), connected)
        try:
            yield make_app(gateway)
        finally:
            gateway.overview.close()
