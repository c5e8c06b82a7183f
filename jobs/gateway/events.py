"""Replies that are streams of server-sent events.

Events of one wake go out in one write. While there are none, comments keep the connection open. An
error in the middle of a stream is an event, which OpenAI's clients raise.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from starlette.types import Receive, Scope, Send

from jobs.errors import JobError
from jobs.gateway.failures import HttpError, failed
from jobs.gateway.figures import StreamFigures
from jobs.gateway.leaving import end, left

PING = b": ping\n"  # without an empty line, for which the openai package would read an event
DONE = b"data: [DONE]\n\n"
HEAD_SECONDS = 1.0  # an error within this time has a status of its own
MOST_BYTES = 256 * 1024  # that wait for the client; then the stream is read again from its log
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # nginx hands on each event
]


def event(data: str, id: str | None = None, name: str | None = None) -> bytes:
    """One event. `data` is one line."""
    head = f"id: {id}\n" if id else ""
    head += f"event: {name}\n" if name else ""
    return f"{head}data: {data}\n\n".encode()


class EventStream:
    """A reply with the events of `source`, in bytes. An error before the first one is raised as
    HttpError, a later one is sent. `on_leave`: called if the client goes away before the end."""

    def __init__(
        self,
        source: AsyncIterator[bytes],
        ping_seconds: float,
        on_leave: Callable[[], Awaitable[None]],
    ) -> None:
        self._source, self._ping_seconds, self._on_leave = source, ping_seconds, on_leave
        self._waiting = bytearray()
        self._wake, self._room = asyncio.Event(), asyncio.Event()
        self._failure: HttpError | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        figures = StreamFigures(scope)
        reading = asyncio.create_task(self._read(figures))
        watching = asyncio.create_task(left(receive))
        for task in (reading, watching):
            task.add_done_callback(lambda _: self._wake.set())
        figures.open()
        try:
            started = False
            while True:
                data = await self._next(self._ping_seconds if started else HEAD_SECONDS)
                if watching.done():
                    break
                over = reading.done() and not self._waiting
                if over:
                    reading.result()
                    if self._failure is not None:
                        if not started and not data:
                            raise self._failure
                        data += event(self._failure.to_json())
                if not started:
                    await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
                    started = True
                await send({"type": "http.response.body", "body": data, "more_body": not over})
                figures.sent(len(data))
                if over:
                    return
        finally:
            figures.close()
            gone = watching.done() and not watching.cancelled()
            await end(reading, watching)
        if gone:
            await self._on_leave()

    async def _next(self, seconds: float) -> bytes:
        """The events that have come; a comment if none comes for so long."""
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            return PING
        self._wake.clear()
        data = bytes(self._waiting)
        self._waiting.clear()
        self._room.set()
        return data

    async def _read(self, figures: StreamFigures) -> None:
        try:
            async with aclosing(self._source) as source:  # type: ignore[type-var]
                async for one in source:
                    figures.came()
                    self._waiting += one
                    self._wake.set()
                    if len(self._waiting) > MOST_BYTES:
                        self._room.clear()
                        await self._room.wait()
        except HttpError as error:
            self._failure = error
        except JobError as error:
            self._failure = failed(error)


def nothing() -> Any:
    """For streams whose client may leave without an effect."""
    return asyncio.sleep(0)
