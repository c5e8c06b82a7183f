"""/ and /health, which need no key: what this is, and whether Redis answers."""

from __future__ import annotations

from importlib.metadata import version

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jobs.gateway.failures import JsonReply
from jobs.gateway.gateway import Gateway
from jobs.store.connection.protocol import Steps, command, run_async


def routes(gateway: Gateway) -> list[Route]:
    async def root(request: Request) -> Response:
        about = {"name": "chatjobs", "version": version("chatjobs"), "base_url": "/v1"}
        return JsonReply(about)

    async def health(request: Request) -> Response:
        await run_async(_ping(), gateway.client.connection)
        workers = await gateway.models.workers()
        return JsonReply({"status": "ok", "workers": workers})

    return [
        Route("/", root, methods=["GET"]),
        Route("/health", health, methods=["GET"]),
    ]


def _ping() -> Steps[None]:
    yield command("ping")
