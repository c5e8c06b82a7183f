"""The HTTP connections of a gateway: limits on their number, on slow clients, and errors in JSON.

uvicorn has no limit on the time of a request's head, none on a client that never reads, and replies
to what is no HTTP in plain text.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable
from functools import partial
from http import HTTPStatus
from time import monotonic
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from jobs.gateway.failures import HttpError
from jobs.gateway.figures import NO_ROUTE, Figures
from jobs.gateway.settings import Settings

LOOKS = 3  # in a row in which a client takes nothing; then it is cut off


class Connection(H11Protocol):
    """One connection. `sweep` looks at all of them once in a while."""

    def __init__(self, settings: Settings, figures: Figures, **options: Any) -> None:
        super().__init__(**options)
        self._settings, self._figures = settings, figures
        self._head_since: float | None = None  # when it began to wait for a request's head
        self._stuck = (0, 0)  # bytes that the client has not taken, and for how many looks

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_since = monotonic()
        if len(self.connections) > self._settings.max_connections:
            most = self._settings.max_connections
            self._refuse(
                HttpError(
                    503,
                    f"the gateway has {most} open connections, and takes no more "
                    "(--max-connections)",
                    "unavailable",
                    headers={"retry-after": "2"},
                )
            )

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._head_since is None and not self._replies():
            self._head_since = monotonic()
        super().data_received(data)
        if self._replies():
            self._head_since = None

    def send_400_response(self, msg: str) -> None:
        self._refuse(HttpError(400, "this is no valid HTTP request", "invalid_http"))

    def look(self, now: float) -> None:
        """Close the connection if its client is too slow. Called once in a while."""
        if self._head_since is not None and now - self._head_since > self._settings.read_seconds:
            seconds = self._settings.read_seconds
            self._refuse(
                HttpError(
                    408,
                    f"the head of the request did not arrive within {seconds:g} s",
                    "request_timeout",
                )
            )
            self._head_since = None
        size, looks = self.transport.get_write_buffer_size(), 0
        if size and size == self._stuck[0]:
            looks = self._stuck[1] + 1
        self._stuck = (size, looks)
        if looks >= LOOKS:
            self.transport.abort()

    def _replies(self) -> bool:
        """True while a request is read or answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, error: HttpError) -> None:
        """Reply to a request that no application sees, and close."""
        self._figures.requests[NO_ROUTE, error.status] += 1
        body = error.to_json().encode()
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            "x-request-id": secrets.token_hex(16),
            **error.headers,
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        phrase = HTTPStatus(error.status).phrase
        self.transport.write(f"HTTP/1.1 {error.status} {phrase}\r\n{lines}\r\n".encode() + body)
        self.transport.close()


def protocol(settings: Settings, figures: Figures) -> Any:
    """The class of the connections, for uvicorn."""
    return partial(Connection, settings, figures)


def sweep(connections: Iterable[Any], settings: Settings) -> float:
    """Look at all connections. Returns seconds until the next time."""
    now = monotonic()
    for one in list(connections):
        one.look(now)
    return min(settings.read_seconds, settings.write_seconds / LOOKS)
