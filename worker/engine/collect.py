"""Sinks and listeners that keep what they hear, for callers in the same process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from jobs.api.answer import ChatCompletion, FinishReason
from jobs.errors import JobError
from jobs.stream.delta import Delta
from worker.backend import Generation, Outcome
from worker.engine.sequence import TokenEvent


class Cancellable(Protocol):
    def cancel(self) -> None: ...


class CollectingSink:
    """Keeps the pieces of a chat until they are taken, and its outcome."""

    def __init__(self) -> None:
        self._pieces: list[Delta] = []
        self._outcome: Outcome | None = None

    def deltas(self, pieces: Sequence[Delta]) -> None:
        self._pieces.extend(pieces)

    def ended(self, outcome: Outcome) -> None:
        self._outcome = outcome

    def take(self) -> list[Delta]:
        """What came since the last time."""
        taken, self._pieces = self._pieces, []
        return taken

    def completion(self) -> ChatCompletion:
        """The answer of a request that has ended. Raises JobError if it failed."""
        assert self._outcome is not None
        if self._outcome.completion is None:
            raise self._outcome.error or JobError("internal", "the request ended with no answer")
        return self._outcome.completion


class Collected:
    """Keeps the steps of one sequence."""

    def __init__(self) -> None:
        self.steps: list[TokenEvent] = []

    def listen(self, step: TokenEvent) -> None:
        self.steps.append(step)

    def generation(self) -> Generation:
        """The whole, when the sequence has ended. Raises JobError if it failed."""
        last = self.steps[-1]
        if last.error is not None:
            raise last.error
        drawn = [step.sampled for step in self.steps if step.sampled is not None]
        reason: FinishReason = last.finish_reason or "stop"
        logprobs = [sampled.logprob for sampled in drawn if sampled.logprob is not None]
        return Generation(
            token_ids=[sampled.token_id for sampled in drawn],
            text="".join(step.text for step in self.steps),
            finish_reason=reason,
            logprobs=logprobs if len(logprobs) == len(drawn) and drawn else None,
        )
