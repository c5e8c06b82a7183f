"""Fields of a body that are the gateway's own, or that several families of routes read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jobs.api.wire import describe
from jobs.errors import JobError, invalid


def about(error: JobError, param: str) -> JobError:
    """The error of a job, with the name that its field has in the request of the client."""
    message = error.message
    if error.param is not None and message.startswith(error.param):
        message = param + message[len(error.param) :]
    return JobError.from_dict({**error.to_dict(), "param": param, "message": message})


def wants_usage(body: Mapping[str, Any]) -> bool:
    """True if the stream ends with the token counts."""
    options = body.get("stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True


def take_background(body: dict[str, Any]) -> bool:
    """Remove `background`: the jobs go on if their client goes away. Raises InvalidRequest."""
    return take_flag(body, "background")


def take_flag(body: dict[str, Any], name: str) -> bool:
    """Remove a field that is true or false, by default false. Raises InvalidRequest."""
    value = body.pop(name, None)
    if value is not None and not isinstance(value, bool):
        raise invalid(f"{name}: expected true or false, got {describe(value)}", name)
    return bool(value)
