"""The queues that a request has passed through: each has an id, and each is passed once.

A worker of an upstream names them in a header, like HTTP's Via; a gateway keeps them with the job,
and refuses a request that has passed its own queue.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from jobs.api.wire import describe
from jobs.errors import invalid

HEADER = "x-chatjobs-via"
QUEUE_ID = re.compile(r"[0-9a-f]{16}")
MOST = 16  # queues in a row
LOOP = "upstream_loop"  # code of the error that a gateway refuses such a request with


def to_header(queues: Iterable[str]) -> str:
    """The value of the header."""
    return ", ".join(queues)


def from_header(value: str) -> list[str]:
    """The queues in a value of the header. Raises InvalidRequest."""
    queues = [one.strip() for one in value.split(",")]
    if len(queues) > MOST or not all(map(QUEUE_ID.fullmatch, queues)):
        raise invalid(
            f"{HEADER}: expected up to {MOST} ids of queues with commas between, got "
            f"{describe(value)}: only workers with --upstream send this header",
            HEADER,
        )
    return queues


def queues_of(value: Sequence[str]) -> Sequence[str]:
    """`job.via`. Raises ValueError."""
    if len(value) > MOST or not all(map(QUEUE_ID.fullmatch, value)):
        raise ValueError(f"must have up to {MOST} ids of queues: leave it to the gateway")
    return value
