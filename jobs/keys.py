"""The names of all queues, keys and channels of chatjobs in Redis. RQ's are in client/rq_format.py.

The names of one job have its id in braces, so that Redis Cluster keeps them in one hash slot.
"""

from __future__ import annotations

import re

JOB_ID = re.compile(r"[A-Za-z0-9_-]{1,200}")
RUN_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}")

TASK = "worker.tasks.chat_completion"  # function name of every chatjobs job

CONTROL = "chatjobs:control"  # pub/sub: cancel
OUTBOXES = "chatjobs:outboxes"  # set: runs that have an outbox
LIMITS = "chatjobs:limits"  # hash: the limits that an operator has set
OPEN_BYTES = "chatjobs:open-bytes"  # hash: bytes of the jobs that have not ended, by queue key
DEADLINES = "chatjobs:deadlines"  # sorted set: jobs with a ttl; scores are their ends in ms

ROWS_PER_KEY = 100  # rows whose reservations share one hash, small enough for a compact one


def chat_queue(model: str) -> str:
    """RQ queue of the interactive jobs of a model."""
    return f"chat:{model}"


def bulk_queue(model: str) -> str:
    """RQ queue of the bulk jobs of a model: served after the chat queue."""
    return f"bulk:{model}"


def queue(model: str, priority: str) -> str:
    """RQ queue of `model` for a job of this priority ("interactive" or "bulk")."""
    return bulk_queue(model) if priority == "bulk" else chat_queue(model)


def log(job: str) -> str:
    """Replay log of a job's tokens: a Redis stream with ids `<attempt>-<seq>` that expires."""
    return f"chatjobs:{{{job}}}:log"


def live(job: str) -> str:
    """Pub/sub channel: the entries of the log as they are written."""
    return f"chatjobs:{{{job}}}:live"


def outbox(run: str) -> str:
    """Redis stream of the ended jobs whose rows are not in Parquet yet."""
    return f"chatjobs:outbox:{run}"


def rows(run: str, row: int) -> str:
    """Hash of the reserved rows near `row`: the request that has each, as a digest."""
    return f"chatjobs:rows:{run}:{row // ROWS_PER_KEY}"


def parts(run: str) -> str:
    """Hash of part plans: which outbox entries an unfinished Parquet file will contain."""
    return f"chatjobs:parts:{run}"


def worker(name: str) -> str:
    """A worker's state as JSON, and its lease: expires if the worker stops renewing it."""
    return f"chatjobs:worker:{name}"
