"""Sessions of a soak: what must be in them at the end."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from jobs import Client, JobError
from jobs.api.conversation import Turn
from tests.soak.ledger import Submitted


@dataclass(slots=True)
class Conversation:
    """One session, and the jobs of its turns in the order of their submits. Times are of
    time.monotonic."""

    id: str
    model: str
    opened_at: float
    jobs: list[Submitted] = field(default_factory=list)

    @property
    def ended_at(self) -> float:
        """When the last of its streams has ended."""
        return max((job.stream_ended_at or math.inf for job in self.jobs), default=math.inf)


def check_conversations(
    client: Client,
    conversations: list[Conversation],
    rows: dict[str, list[dict[str, Any]]],
    losses: list[tuple[float, float]],
    counts: dict[str, Any],
) -> Iterator[str]:
    """Each turn is there once, in the order of the submits, with the answer of its job; and none is
    missing from a session that lived while Redis lost no writes."""
    whole = turns = 0
    for one in conversations:
        try:
            found = client.session(one.id).turns()
        except JobError as error:
            if error.code != "not_found":
                raise
            found = []
        turns += len(found)
        yield from _check_turns(one, found)
        if not any(since <= one.ended_at and one.opened_at <= until for since, until in losses):
            whole += 1
            yield from _check_nothing_is_missing(one, found, rows)
    counts |= {
        "sessions": len(conversations),
        "their turns": turns,
        "sessions without a loss of Redis": whole,
    }


def _check_turns(one: Conversation, found: list[Turn]) -> Iterator[str]:
    numbers = {job.id: number for number, job in enumerate(one.jobs)}
    order = [numbers.get(turn.job, -1) for turn in found]
    if -1 in order or order != sorted(set(order)):
        yield f"session {one.id} has the turns {order} of its jobs, in this order"
        return
    for turn, number in zip(found, order, strict=True):
        job = one.jobs[number]
        answer = str(turn.answer["content"])
        is_right = answer == job.texts[0]
        if turn.finish_reason == "cancelled":
            is_right = job.cancelled and job.texts[0].startswith(answer)
        if not is_right:
            yield f"session {one.id} has the answer {answer!r} to job {job.id}"


def _check_nothing_is_missing(
    one: Conversation, found: list[Turn], rows: dict[str, list[dict[str, Any]]]
) -> Iterator[str]:
    present = {turn.job for turn in found}
    for job in one.jobs:
        ends = {row["error_type"] for row in rows.get(job.id, ())}
        if ends == {None} and job.id not in present:
            yield f"session {one.id} lacks the turn of job {job.id}"
