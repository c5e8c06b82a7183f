"""Events of running attempts, from the engine's thread and others to the worker's loop."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jobs.stream.delta import Delta
from worker.backend import Outcome
from worker.queue.attempt import Attempt
from worker.queue.circuit_breaker import CircuitBreaker


@dataclass(frozen=True, slots=True)
class Ended:
    """An attempt has its outcome."""

    attempt: Attempt
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Woken:
    """There are deltas to publish, or the worker was asked to stop."""


@dataclass(frozen=True, slots=True)
class Pending:
    """The engine has events of an attempt, which `deliver` passes to its sink."""

    attempt: Attempt
    deliver: Callable[[], None]


Event = Ended | Woken | Pending


class AttemptSink:
    """Passes an attempt's events from the engine's thread to the loop's, which has the time to
    assemble them. Never blocks."""

    def __init__(
        self, attempt: Attempt, events: queue.SimpleQueue[Event], breaker: CircuitBreaker
    ) -> None:
        self._attempt, self._events, self._breaker = attempt, events, breaker
        self._publishes = attempt.request.publishes

    def pending(self, deliver: Callable[[], None]) -> None:
        self._events.put(Pending(self._attempt, deliver))

    def deltas(self, deltas: Sequence[Delta]) -> None:
        if not self._attempt.generated:
            self._attempt.generated = True
            self._breaker.generates(self._attempt.generation)
        if self._publishes and self._attempt.stream.add(deltas):
            self._events.put(Woken())

    def ended(self, outcome: Outcome) -> None:
        self._events.put(Ended(self._attempt, outcome))
