"""The live page: /, its files, and /status, the figures that it shows.

The page needs no key, and asks for one. All that it shows comes from /status and /v1 with that key.
"""

from __future__ import annotations

from importlib.metadata import version
from importlib.resources import files

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from jobs.gateway.endpoints import route
from jobs.gateway.failures import JsonReply
from jobs.gateway.gateway import Gateway
from jobs.gateway.tenants import Tenant

PAGE = "live.html"
FILES = {
    "live.css": "text/css; charset=utf-8",
    "live.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
# Nothing is loaded from elsewhere, no script and no style is in the page, no text becomes markup.
POLICY = "; ".join(
    (
        "default-src 'none'",
        *(f"{kind}-src 'self'" for kind in ("script", "style", "connect", "img")),
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # a new version of the gateway has new files
}


def routes(gateway: Gateway) -> list[Route]:
    folder = files("jobs.gateway") / "page"
    contents = {name: (folder / name).read_bytes() for name in (PAGE, *FILES)}

    async def root(request: Request) -> Response:
        if "text/html" in request.headers.get("accept", ""):
            headers = HEADERS | {"vary": "accept"}
            return Response(contents[PAGE], media_type="text/html; charset=utf-8", headers=headers)
        about = {"name": "chatjobs", "version": version("chatjobs"), "base_url": "/v1"}
        return JsonReply(about, headers={"vary": "accept"})

    async def file(request: Request) -> Response:
        name = request.path_params["file"]
        if name not in FILES:
            raise HTTPException(404)
        return Response(contents[name], media_type=FILES[name], headers=HEADERS)

    async def status(request: Request, tenant: Tenant) -> ASGIApp:
        found = await gateway.overview.read(tenant)
        return JsonReply(found, headers={"cache-control": "no-store"})

    return [
        Route("/", root, methods=["GET"]),
        Route("/page/{file}", file, methods=["GET"]),
        route(gateway, "GET", "/status", status),
    ]
