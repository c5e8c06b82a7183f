"""Requests of workers with --upstream: one that comes back to the queue it is from is refused."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from jobs.api.via import HEADER, LOOP, from_header
from jobs.gateway.failures import HttpError
from jobs.gateway.redis_waits import in_time
from jobs.store.connection.protocol import Connection, run_async
from jobs.store.queue_id import queue_id


async def refuse_loop(request: Request, connection: Connection) -> None:
    """Raises HttpError for a request that has passed the queue of this gateway."""
    value = request.headers.get(HEADER)
    if value is None:
        return
    if await in_time(run_async(queue_id(), connection)) in from_header(value):
        raise HttpError(
            400,
            "the request is from the queue of this gateway, and would come back to it without end: "
            "a worker of the same Redis sends its jobs here, directly or through other gateways; "
            "give its --upstream the server that has the model",
            LOOP,
            headers={"x-should-retry": "false"},
        )


def keep_via(request: Request, body: dict[str, Any]) -> None:
    """Let the jobs of a request have the queues that it has passed."""
    value = request.headers.get(HEADER)
    options = body.get("job") or {}
    if value is not None and isinstance(options, dict):
        body["job"] = {**options, "via": from_header(value)}
