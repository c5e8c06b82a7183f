"""The application: the routes of all families, and what each reply has."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jobs.errors import JobError
from jobs.gateway import failures
from jobs.gateway.batches.watch import watch_batches
from jobs.gateway.endpoints import REQUEST_ID
from jobs.gateway.files.sweeping import sweep_files
from jobs.gateway.gateway import Gateway
from jobs.gateway.hosts import LocalHosts
from jobs.gateway.leaving import end
from jobs.gateway.openapi import document
from jobs.gateway.routes import batches, chat, completions, files, health, live, models, responses

FAMILIES = (health, live, models, chat, completions, responses, files, batches, document)


def make_app(gateway: Gateway) -> ASGIApp:
    """The application of a gateway, which closes its connections at the end."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        sweeping = asyncio.create_task(sweep_files(gateway.settings.results))
        settings = gateway.settings
        running = asyncio.create_task(watch_batches(settings))
        yield
        await end(sweeping, running)
        await gateway.close()

    origins = list(gateway.settings.cors_origins)
    cors = Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "x-should-retry", "retry-after"],
    )
    app = Starlette(
        routes=[one for family in FAMILIES for one in family.routes(gateway)],
        middleware=[cors] if origins else [],
        exception_handlers={
            HTTPException: failures.http_exception,
            failures.HttpError: failures.http_error,
            JobError: failures.job_error,
            Exception: failures.unexpected,
        },
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return _Identified(app if gateway.settings.api_key_file else LocalHosts(app))


class _Identified:
    """Gives each reply an x-request-id. A request that the end of the process cuts off before its
    reply gets one as well."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[REQUEST_ID] = secrets.token_hex(16)
        started = False

        async def identified(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                name = (b"x-request-id", scope[REQUEST_ID].encode())
                message = {**message, "headers": [*message["headers"], name]}
            await send(message)

        try:
            await self._app(scope, receive, identified)
        except asyncio.CancelledError:
            if started:
                return  # the server closes the connection
            stops = failures.HttpError(
                503,
                "the gateway is stopping, and the job goes on: send the request again",
                "unavailable",
                headers={"retry-after": str(failures.RETRY_SECONDS)},
            )
            await stops.reply()(scope, receive, identified)
