"""`JobError`, the exception of the whole API: a stable code, a message, OpenAI's JSON form.

docs/errors.md lists the codes.
"""

from __future__ import annotations

import threading
from typing import Any, Literal, get_args

ErrorCode = Literal[
    "invalid_request",
    "model_not_found",
    "model_not_loaded",
    "unsupported_model",
    "context_length_exceeded",
    "out_of_memory",
    "timeout",
    "cancelled",
    "worker_lost",
    "not_found",
    "unavailable",
    "queue_full",
    "session_busy",
    "internal",
]
ERROR_CODES: tuple[str, ...] = get_args(ErrorCode)
RETRYABLE_CODES = frozenset(
    {"out_of_memory", "worker_lost", "queue_full", "session_busy", "unavailable", "internal"}
)


class JobError(Exception):
    """A failure: a stable code for programs, a sentence for people, the request field at fault."""

    def __init__(self, code: ErrorCode, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code: ErrorCode = code
        self.message = message
        self.param = param

    @property
    def retryable(self) -> bool:
        """True if the same request, or the same call, may succeed when it is repeated."""
        return self.code in RETRYABLE_CODES

    def to_dict(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = "server_error" if self.retryable else "invalid_request_error"
        return {"message": self.message, "type": kind, "param": self.param, "code": self.code}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> JobError:
        """The error that `to_dict` wrote; an unknown code becomes `internal`."""
        code = data.get("code")
        known: ErrorCode = code if code in ERROR_CODES else "internal"
        make = InvalidRequest if known == "invalid_request" else JobError
        return make(known, str(data.get("message", "")), data.get("param"))

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.code, self.message, self.param))

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


class InvalidRequest(JobError, ValueError):
    """The request is invalid: it can't run without a change."""


class SessionBusy(JobError):
    """A turn of the session has not ended: `job_id` is its job. Wait for it or cancel it."""

    def __init__(self, message: str, job_id: str) -> None:
        super().__init__("session_busy", message)
        self.job_id = job_id

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.message, self.job_id))


class StreamRestarted(JobError):
    """The job `job_id` has started again, since its worker was lost or its attempt failed, and its
    answer differs from the part that a stream has given out. The job goes on, unless the message
    says that it is cancelled: another stream gives its new answer."""

    def __init__(self, message: str, job_id: str) -> None:
        super().__init__("worker_lost", message)
        self.job_id = job_id

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.message, self.job_id))


class WaitTimeout(JobError, TimeoutError):
    """A wait reached its `timeout`. The jobs go on, and can be waited for again, unless the message
    says that they are cancelled."""

    def __init__(self, message: str) -> None:
        super().__init__("timeout", message)

    @property
    def retryable(self) -> bool:
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.message,))


def invalid(message: str, param: str | None = None) -> InvalidRequest:
    """An `invalid_request` error about `param`."""
    return InvalidRequest("invalid_request", message, param)


def failure_of(error: BaseException) -> JobError:
    """The error of a job during which `error` was raised.

    For handlers of BaseException: a panic in a Rust library is not an Exception. KeyboardInterrupt
    and SystemExit of the main thread are meant for the process and are raised again.
    """
    if isinstance(error, JobError):
        return error
    stops = isinstance(error, (KeyboardInterrupt, SystemExit))
    if stops and threading.current_thread() is threading.main_thread():
        raise error
    return JobError("internal", f"{type(error).__name__}: {error}")
