"""Every queue, key and channel name in Redis, in one place.

Job-specific names hold the job id in braces, so that a cluster keeps them in one slot.
"""

from __future__ import annotations

import re

JOB_ID = re.compile(r"[A-Za-z0-9_-]{1,200}")
RUN_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}")

TASK = "worker.tasks.chat_completion"  # the func of every job of ours

CONTROL = "chatjobs:control"  # pub/sub: load, unload, cancel
OUTBOXES = "chatjobs:outboxes"  # set: runs that have rows on their way to Parquet


def chat_queue(model: str) -> str:
    """RQ queue of the jobs that somebody waits for."""
    return f"chat:{model}"


def bulk_queue(model: str) -> str:
    """RQ queue of bulk jobs: taken when the chat queue leaves room."""
    return f"bulk:{model}"


def queue(model: str, priority: str) -> str:
    """RQ queue of `model` for a job of this priority ("interactive" or "bulk")."""
    return bulk_queue(model) if priority == "bulk" else chat_queue(model)


def log(job: str) -> str:
    """Replay log of the token stream: a Redis stream with ids `<attempt>-<seq>`; expires."""
    return f"chatjobs:{{{job}}}:log"


def live(job: str) -> str:
    """Pub/sub channel: the entries of the log as they happen."""
    return f"chatjobs:{{{job}}}:live"


def outbox(run: str) -> str:
    """Redis stream of finished rows on their way to Parquet."""
    return f"chatjobs:outbox:{run}"


def parts(run: str) -> str:
    """Hash of part plans: which outbox entries a file in the making holds."""
    return f"chatjobs:parts:{run}"


def worker(name: str) -> str:
    """What a worker is doing, and its lease: it expires when the worker no longer renews it."""
    return f"chatjobs:worker:{name}"
