"""One round of collecting events."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from worker.queue.attempt_sink import Pending
from worker.queue.attempts import Attempts


def test_a_round_ends_although_events_come_all_the_time() -> None:
    unused: Any = None
    attempts = Attempts(unused, unused, unused, unused, unused, unused)
    attempt = cast(Any, SimpleNamespace(lease=SimpleNamespace(job="j")))
    delivered: list[int] = []

    def deliver() -> None:
        delivered.append(1)
        if len(delivered) < 1000:
            attempts._events.put(Pending(attempt, deliver))

    attempts._running["j"] = attempt
    attempts._events.put(Pending(attempt, deliver))
    attempts.collect(1.0)
    assert 1 < len(delivered) < 10
