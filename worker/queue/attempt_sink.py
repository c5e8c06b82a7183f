"""Events of running attempts, from the engine's thread and others to the worker's loop."""

from __future__ import annotations

import queue
from dataclasses import dataclass

from worker.backend import Assembly, Outcome
from worker.queue.attempt import Attempt


@dataclass(frozen=True, slots=True)
class Ended:
    """An attempt has ended before the engine had any event of it."""

    attempt: Attempt
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Woken:
    """A job may wait, or the worker was asked to stop."""


@dataclass(frozen=True, slots=True)
class Pending:
    """The engine has events of an attempt, which `assembly` makes deltas of."""

    attempt: Attempt
    assembly: Assembly


Event = Ended | Woken | Pending


class AttemptSink:
    """Passes an attempt's events from the engine's thread to the loop's, which has the time to
    assemble them. Never blocks."""

    def __init__(
        self, attempt: Attempt, events: queue.SimpleQueue[Event], *, hands_on: bool
    ) -> None:
        self._attempt, self._events = attempt, events
        self.hands_on = hands_on

    def pending(self, assembly: Assembly) -> None:
        self._events.put(Pending(self._attempt, assembly))

    def ended(self, outcome: Outcome) -> None:
        self._events.put(Ended(self._attempt, outcome))
