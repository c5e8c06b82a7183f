"""/v1/models: the names that workers serve, with their aliases; and the routes of tokenizers."""

from __future__ import annotations

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from jobs.gateway.endpoints import route
from jobs.gateway.failures import JsonReply
from jobs.gateway.gateway import Gateway
from jobs.gateway.routes import tokens
from jobs.gateway.served import unknown_model
from jobs.gateway.tenants import Tenant


def routes(gateway: Gateway) -> list[Route]:
    async def list_models(request: Request, tenant: Tenant) -> ASGIApp:
        models = await gateway.models.models()
        return JsonReply({"object": "list", "data": [one.to_dict() for one in models.values()]})

    async def get_model(request: Request, tenant: Tenant) -> ASGIApp:
        name = request.path_params["id"]
        models = await gateway.models.models()
        if name not in models:
            raise unknown_model(name, models)
        return JsonReply(models[name].to_dict())

    return [
        route(gateway, "GET", "/v1/models", list_models),
        route(gateway, "GET", "/v1/models/{id:path}", get_model),
        *tokens.routes(gateway),
    ]
