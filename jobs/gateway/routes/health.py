"""/health and /metrics, which need no key: whether Redis answers, and figures."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jobs.gateway.failures import JsonReply
from jobs.gateway.gateway import Gateway
from jobs.gateway.metrics import GatewayCollector
from jobs.gateway.redis_waits import read_soon
from jobs.metrics_page import MetricsPage
from jobs.store.connection.protocol import ping


def routes(gateway: Gateway) -> list[Route]:
    async def health(request: Request) -> Response:
        await read_soon(ping, gateway.client.connection)
        workers = await gateway.models.workers()
        return JsonReply({"status": "ok", "workers": workers})

    page = MetricsPage(GatewayCollector(gateway.figures))

    async def metrics(request: Request) -> Response:
        body, content_type = page.render(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    return [
        Route("/metrics", metrics, methods=["GET"]),
        Route("/health", health, methods=["GET"]),
    ]
