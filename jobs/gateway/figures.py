"""Counts the requests and the streams of one gateway process.

Owned by the event loop's thread. Labels are of limited number: paths are those of routes, and
nothing names a tenant, a model or a job.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from time import monotonic
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

FIGURES = "chatjobs.figures"  # in the scope of a request: the Figures of the process
RECEIVED = "chatjobs.received"  # and the time at which its head was there, monotonic

NO_ROUTE = "none"  # the handler of requests that no route takes
LEFT = 499  # the status of a request whose client left before its reply, as nginx has it
# Upper bounds of the buckets of the time that is added to the first event, in seconds.
BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class Figures:
    """Counts since the start of the process.

    requests: by path of the route, and status. streams: that are open. stream_bytes: sent of their
    events. added: streams by bucket of the time that the gateway has added to their first event.
    """

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.streams = 0
        self.stream_bytes = 0
        self.added = [0] * (len(BOUNDS) + 1)
        self.added_sum = 0.0

    def add_first_event(self, seconds: float) -> None:
        self.added[bisect_left(BOUNDS, seconds)] += 1
        self.added_sum += seconds


class Counted:
    """Counts the requests of an application."""

    def __init__(self, app: ASGIApp, figures: Figures) -> None:
        self._app, self._figures = app, figures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[FIGURES], scope[RECEIVED] = self._figures, monotonic()
        status = LEFT

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, counted)
        finally:
            self._figures.requests[handler_of(scope), status] += 1


def handler_of(scope: Scope) -> str:
    """The path of the route that takes a request."""
    path: Any = getattr(scope.get("route"), "path", None)
    return path if isinstance(path, str) else NO_ROUTE


class StreamFigures:
    """The figures of one stream.

    The gateway adds to its first event the time until its job is in Redis, and the time from what
    the worker has sent to the first write.
    """

    def __init__(self, scope: Scope) -> None:
        self._figures: Figures | None = scope.get(FIGURES)
        self._before = monotonic() - scope.get(RECEIVED, monotonic())
        self._came: float | None = None  # the first event
        self._sent = False

    def open(self) -> None:
        if self._figures is not None:
            self._figures.streams += 1

    def close(self) -> None:
        if self._figures is not None:
            self._figures.streams -= 1

    def came(self) -> None:
        """An event has come."""
        if self._came is None:
            self._came = monotonic()

    def sent(self, size: int) -> None:
        """Bytes were given to the connection."""
        if self._figures is None:
            return
        self._figures.stream_bytes += size
        if not self._sent and self._came is not None:
            self._sent = True
            self._figures.add_first_event(self._before + monotonic() - self._came)
