"""The questions of the demo as requests."""

from __future__ import annotations

from jobs import ChatRequest
from worker.cli.demo_run import questions


def demo_requests() -> list[ChatRequest]:
    """The 500 questions, greedy."""
    with questions() as source:
        rows = list(source.read(lambda _: True))
    requests = [row.request for row in rows if row is not None]
    return [one for one in requests if isinstance(one, ChatRequest)]
