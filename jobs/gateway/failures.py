"""Failures as OpenAI's clients read them: {"error": {…}}, a status, and whether to retry."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match

from jobs.encoding import to_json
from jobs.errors import ErrorCode, JobError

logger = logging.getLogger(__name__)

RETRY_SECONDS = 2  # after which a client may try again
SHOWN = 200  # characters of a path or an id in a message

STATUS: dict[ErrorCode, int] = {
    "invalid_request": 400,
    "model_not_found": 404,
    "model_not_loaded": 503,
    "unsupported_model": 400,
    "context_length_exceeded": 400,
    "out_of_memory": 503,
    "timeout": 504,
    "cancelled": 409,
    "worker_lost": 503,
    "not_found": 404,
    "unavailable": 503,
    "queue_full": 429,
    "session_busy": 409,
    "internal": 500,
}


class HttpError(Exception):
    """A reply with OpenAI's error object."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        *,
        kind: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, dict(headers or {})
        self.error: dict[str, Any] = {
            "message": message,
            "type": kind or ("server_error" if status >= 500 else "invalid_request_error"),
            "param": param,
            "code": code,
        }

    def to_json(self) -> str:
        return to_json({"error": self.error})

    def reply(self) -> JsonReply:
        return JsonReply({"error": self.error}, self.status, self.headers)


class JsonReply(Response):
    """A reply in JSON, whose text may have lone surrogates."""

    media_type = "application/json"

    def __init__(
        self, content: Any, status_code: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(content, status_code, headers)

    def render(self, content: Any) -> bytes:
        return to_json(content).encode()


def refused(error: JobError) -> HttpError:
    """The reply for a call that failed. The same one may succeed later if it is retryable."""
    headers = {"x-should-retry": "false"}
    if error.retryable:
        headers = {"retry-after": str(RETRY_SECONDS)}
    return _reply(error, headers)


def failed(error: JobError) -> HttpError:
    """The reply for a job that failed: the queue has retried it, so that a client should not."""
    if error.code == "unavailable":  # not the job, but Redis
        return refused(error)
    return _reply(error, {"x-should-retry": "false"})


def _reply(error: JobError, headers: Mapping[str, str]) -> HttpError:
    content, message = error.to_dict(), error.message
    if error.code == "unavailable":  # its message names the server, which is for operators
        logger.warning("a request failed: %s", message)
        message = "the queue can't be reached now: send the request again"
    return HttpError(
        STATUS[error.code],
        message,
        error.code,
        error.param,
        kind=content["type"],
        headers=headers,
    )


async def http_exception(request: Request, error: Exception) -> Response:
    """The reply for a path or a method that there is none of."""
    assert isinstance(error, HTTPException)
    asked = f"{request.method} {request.scope['path'][:SHOWN]}"
    headers = dict(error.headers or {})
    if error.status_code == 404:
        message = f"there is no route {asked}: docs/http.md lists the routes"
        return HttpError(404, message, "unknown_url", headers=headers).reply()
    if error.status_code == 405:
        allowed = headers["Allow"] = _allowed(request)
        message = f"{asked}: this route takes {allowed}"
        return HttpError(405, message, "method_not_allowed", headers=headers).reply()
    return HttpError(error.status_code, error.detail, headers=headers).reply()


def _allowed(request: Request) -> str:
    """The methods of all routes of a path: starlette names those of the first one."""
    found = set[str]()
    for one in request.app.routes:
        if one.matches(request.scope)[0] is not Match.NONE:
            found |= one.methods
    return ", ".join(sorted(found))


async def http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HttpError)
    return error.reply()


async def job_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, JobError)
    return refused(error).reply()


async def unexpected(request: Request, error: Exception) -> Response:
    """The reply for a fault of the gateway, which is logged."""
    message = f"{type(error).__name__} in the gateway, whose log has the details"
    headers = {"connection": "close", "x-should-retry": "false"}  # the server closes it
    return HttpError(500, message, "internal", headers=headers).reply()
