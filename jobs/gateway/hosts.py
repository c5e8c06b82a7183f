"""The names that requests may call a gateway without keys by.

A page of another site can let its own name lead to this machine (DNS rebinding). The browser then
takes the gateway for a part of that site. Its requests have that name as Host.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jobs.api.wire import describe
from jobs.gateway.failures import HttpError
from jobs.gateway.settings import is_loopback


class LocalHosts:
    """Refuses requests whose Host is no name of this machine. No browser sends one without it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host") if scope["type"] == "http" else None
        if not host or is_loopback(_name(host)):
            await self._app(scope, receive, send)
            return
        error = HttpError(
            403,
            f"the request has the Host {describe(host)}, and a gateway without keys takes those of "
            "this machine only: use localhost or 127.0.0.1 in base_url, or start the gateway with "
            "--api-key-file",
            "host_not_allowed",
            headers={"x-should-retry": "false"},
        )
        await error.reply()(scope, receive, send)


def _name(host: str) -> str:
    """A Host without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()
