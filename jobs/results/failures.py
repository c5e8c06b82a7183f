"""The failed attempts at a job: when, on which worker and why. In its hash and its row."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypedDict

from jobs.encoding import encodable
from jobs.errors import JobError

KEPT = 10  # the newest ones are kept
MAX_MESSAGE = 200  # characters
MAX_TIME = 2**33  # seconds since the epoch: the year 2242


class Failure(TypedDict):
    """The failure of one attempt. `at` is in seconds since the epoch, `code` is JobError's."""

    attempt: int
    at: float
    worker: str
    code: str
    message: str


def failure(attempt: int, at: float, worker: str, error: JobError) -> Failure:
    return Failure(
        attempt=attempt,
        at=round(at, 3),
        worker=worker,
        code=error.code,
        message=encodable(error.message)[:MAX_MESSAGE],
    )


def add_failure(before: Sequence[Failure], new: Failure) -> list[Failure]:
    """The failures with one more, at most KEPT."""
    return [*before, new][-KEPT:]


def parse_failures(value: bytes | None) -> list[Failure]:
    """The failures in a job's hash, which anyone may write to. Never raises."""
    try:
        found = json.loads(value or b"[]")
    except (ValueError, RecursionError):
        return []
    if not isinstance(found, list):
        return []
    return [one for one in map(_parse, found[-KEPT:]) if one is not None]


def _parse(value: Any) -> Failure | None:
    match value:
        case {
            "attempt": int(attempt),
            "at": int(at) | float(at),
            "worker": str(worker),
            "code": str(code),
            "message": str(message),
        } if 0 <= attempt < 2**31 and 0 <= at < MAX_TIME:
            return Failure(attempt=attempt, at=at, worker=worker, code=code, message=message)
    return None
