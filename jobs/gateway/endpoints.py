"""An endpoint: finds the tenant of a request, and replies while it has one request more open."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from jobs.gateway.bodies import HANDS_ON, LargeBody
from jobs.gateway.gateway import Gateway
from jobs.gateway.loops import refuse_loop
from jobs.gateway.tenants import Tenant

REQUEST_ID = "chatjobs.request_id"  # in the scope: the value of x-request-id

Handler = Callable[[Request, Tenant], Awaitable[ASGIApp]]


class Endpoint:
    """The application of a route that needs a key, if there are any. `handle` returns the reply."""

    def __init__(self, gateway: Gateway, handle: Handler) -> None:
        self._gateway, self._handle = gateway, handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        tenant = self._gateway.keys.tenant_of(request.headers.get("authorization"))
        await refuse_loop(request, self._gateway.client.connection)
        large = self._gateway.large
        if large is not None:
            scope[HANDS_ON] = True
        with tenant.opened(), suppress(ClientDisconnect):  # in the middle of its body
            try:
                reply = await self._handle(request, tenant)
            except LargeBody as body:
                assert large is not None
                reply = large.reply_to(body.content)
            await reply(scope, receive, send)


def route(gateway: Gateway, method: str, path: str, handle: Handler) -> Route:
    """The route of one method and path for tenants."""
    return Route(path, Endpoint(gateway, handle), methods=[method])


def set_request_id(request: Request, value: str) -> None:
    """Let the reply have this x-request-id instead of a fresh one."""
    request.scope[REQUEST_ID] = value


class Gone(Response):
    """The reply for a client that has closed its connection. Sends nothing."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pass
