"""The script that enqueues a job, and its KEYS and ARGV by name."""

from __future__ import annotations

from typing import NamedTuple

from jobs import lua
from jobs.client.turns import TURNS_LUA

ENQUEUE = lua.load("jobs.client", "rq_enqueue", TURNS_LUA)


# The names of the `unpack` lines of rq_enqueue.lua, in the same order.


class EnqueueKeys(NamedTuple):
    job: str
    queue: str
    wip: str
    quarantine: str
    other_queue: str
    other_wip: str
    other_quarantine: str
    queues: str
    log: str
    results: str
    open_bytes: str
    limits: str
    rows: str
    deadlines: str
    wake: str
    deferred: str


class EnqueueArgs(NamedTuple):
    job_id: str
    model: str
    data: bytes
    request_bytes: int
    message_bytes: int
    row: int | str
    digest: bytes
    row_seconds: int
    ttl: int | str
    max_jobs: int
    max_bytes: int
    max_request_bytes: int
    max_message_bytes: int
    max_session_bytes: int
    session: str
    session_waits: int
