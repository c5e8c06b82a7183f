"""Reads the bodies of requests: at most so many bytes, in limited time, as JSON."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Protocol

from starlette.requests import Request
from starlette.types import ASGIApp

from jobs.api.wire import describe, not_json
from jobs.encoding import from_json
from jobs.gateway.failures import HttpError
from jobs.sizes import size_texts

# Bytes of JSON that another process parses, if there is one: others would wait for it. They take
# some milliseconds.
LARGE = 256 * 1024
HANDS_ON = "chatjobs.hands_on"  # in the scope of a request: another process answers large ones
DISCARD_SECONDS = 2.0  # for the rest of a body that is too large: its client reads after it


class LargeBody(Exception):
    """The body of a request that another process answers."""

    def __init__(self, content: bytes) -> None:
        super().__init__(f"{len(content)} bytes")
        self.content = content


class HandsOn(Protocol):
    """Has another process answer requests with large bodies, see `jobs.gateway.large_bodies`."""

    def reply_to(self, body: bytes) -> ASGIApp: ...

    def leave(self) -> None: ...


async def read_body(request: Request, limit: int, seconds: float) -> bytes:
    """The whole body. Raises HttpError 413 for more than `limit` bytes, 408 after `seconds`."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        await discard(request)
        raise _too_large(int(declared), limit)
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                body += part
                if len(body) > limit:
                    break
    except TimeoutError:
        raise HttpError(
            408,
            f"the body of the request did not arrive within {seconds:g} s: send it faster",
            "request_timeout",
            headers={"connection": "close", "x-should-retry": "false"},
        ) from None
    if len(body) > limit:
        size = len(body)
        del body
        await discard(request)
        raise _too_large(size, limit)
    return bytes(body)


async def read_json(request: Request, limit: int, seconds: float) -> dict[str, Any]:
    """The object in a JSON body. Raises HttpError, and LargeBody for one that is handed on. Nothing
    of the request must be done before."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        given = f"got {describe(kind)}" if kind else "and it has none"
        raise HttpError(
            415,
            f"the request needs the header content-type: application/json, {given}",
            "unsupported_media_type",
        )
    body = await read_body(request, limit, seconds)
    if len(body) >= LARGE and HANDS_ON in request.scope:
        raise LargeBody(body)
    try:
        value = from_json(body)
    except (ValueError, RecursionError) as error:
        raise HttpError(400, f"the request is {not_json(error)}", "invalid_json") from None
    if not isinstance(value, dict):
        raise HttpError(
            400, f"a request must be a JSON object, got {describe(value)}", "invalid_request"
        )
    return value


def _too_large(size: int, limit: int) -> HttpError:
    has, most = size_texts(size, limit)
    return HttpError(
        413,
        f"the body of the request has {has} or more, and the limit (--max-body) is {most}",
        "request_too_large",
        headers={"connection": "close", "x-should-retry": "false"},
    )


async def discard(request: Request) -> None:
    """Take the rest of a body, for a while; a client that waits for permission sends none."""
    if "expect" in request.headers:
        return
    with suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_SECONDS):
            while (await request.receive()).get("more_body", False):
                pass
