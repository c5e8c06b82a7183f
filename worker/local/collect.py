"""Collects deltas and token events for callers in the same process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from jobs.api.answer import ChatCompletion, FinishReason
from jobs.api.chunk import ChatChunk
from jobs.api.request import ChatRequest
from jobs.errors import JobError
from jobs.stream.chunks import ChunkBuilder
from jobs.stream.delta import Delta
from worker.backend import Assembly, Handle, Outcome
from worker.engine.sequence import TokenEvent


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token."""

    id: int
    text: str  # what it adds to the decoded text; may be empty while a character is incomplete
    logprob: float | None
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """The tokens generated after one prompt of token ids."""

    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    logprobs: list[float] | None = None


class CollectingSink:
    """Takes the deltas of a request and its outcome, on the thread of its caller."""

    hands_on = False  # no other worker may run it

    def __init__(self) -> None:
        self._assembly: Assembly | None = None  # set by the thread that steps
        self._outcome: Outcome | None = None
        self._deltas: list[Delta] = []

    def pending(self, assembly: Assembly) -> None:
        self._assembly = assembly

    def ended(self, outcome: Outcome) -> None:
        self._outcome = outcome

    @property
    def over(self) -> bool:
        """True if the outcome has been taken."""
        return self._outcome is not None

    @property
    def outcome(self) -> Outcome | None:
        """The outcome of a request that has ended."""
        self._advance()
        return self._outcome

    def take(self) -> list[Delta]:
        """Returns the deltas since the last call."""
        self._advance()
        taken, self._deltas = self._deltas, []
        return taken

    def completion(self) -> ChatCompletion:
        """The completion of a request that has ended. Raises JobError if it failed."""
        outcome = self.outcome
        assert outcome is not None
        if not isinstance(outcome.result, ChatCompletion):
            raise outcome.error or JobError("internal", "the request ended with no completion")
        return outcome.result

    def _advance(self) -> None:
        if self._outcome is None and self._assembly is not None:
            deltas, self._outcome = self._assembly.take()
            self._deltas += deltas


def streamed(
    request: ChatRequest,
    started: Handle,
    sink: CollectingSink,
    step: Callable[[], object],
) -> Iterator[ChatChunk]:
    """Step the engine until a request has ended, and yield its chunks as they are generated. It is
    cancelled if the iterator is closed before. `sink`: that of the request, which then has its
    completion. Raises JobError if the request fails."""
    chunks = ChunkBuilder(request.job.id, request.model, int(time.time()))
    try:
        while not sink.over:
            step()
            yield from (chunks.chunk([delta]) for delta in sink.take())
    finally:
        started.cancel()
    completion = sink.completion()
    if request.stream_options is not None and request.stream_options.include_usage:
        yield chunks.usage(completion)


def generation(events: Sequence[TokenEvent]) -> Generation:
    """The result of an ended sequence from all of its events. Raises JobError if it failed."""
    last = events[-1]
    if last.error is not None:
        raise last.error
    sampled = [event.sampled for event in events if event.sampled is not None]
    logprobs = [one.logprob for one in sampled if one.logprob is not None]
    return Generation(
        token_ids=[one.token_id for one in sampled],
        text="".join(event.text for event in events),
        finish_reason=last.finish_reason or "stop",
        logprobs=logprobs if len(logprobs) == len(sampled) and sampled else None,
    )
