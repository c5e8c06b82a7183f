"""One round of collecting events."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from worker.backend import Progress
from worker.queue.attempt_sink import Pending
from worker.queue.attempts import Attempts


def test_a_round_ends_although_events_come_all_the_time() -> None:
    unused: Any = None
    attempts = Attempts(unused, unused, unused, unused, unused, unused, unused)
    attempt = cast(Any, SimpleNamespace(lease=SimpleNamespace(job="j")))
    taken: list[int] = []

    class Endless:
        def take(self) -> Progress:
            taken.append(1)
            if len(taken) < 1000:
                attempts._events.put(Pending(attempt, self))
            return Progress()

    attempts._running["j"] = attempt
    attempts._events.put(Pending(attempt, Endless()))
    attempts.collect(1.0)
    assert 1 < len(taken) < 10
