"""Collects deltas and token events for callers in the same process."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from jobs.api.answer import ChatCompletion, FinishReason
from jobs.api.chunk import ChatChunk
from jobs.api.request import ChatRequest
from jobs.errors import JobError
from jobs.stream.chunks import ChunkBuilder
from jobs.stream.delta import Delta
from worker.backend import Outcome
from worker.engine.chat_generation import ChatGeneration
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
    """Keeps the deltas of a request until they are taken, and its outcome."""

    def __init__(self) -> None:
        self.outcome: Outcome | None = None
        self._deltas: deque[Delta] = deque()  # extended by the thread that steps

    def pending(self, deliver: Callable[[], None]) -> None:
        deliver()

    def deltas(self, deltas: Sequence[Delta]) -> None:
        self._deltas.extend(deltas)

    def ended(self, outcome: Outcome) -> None:
        self.outcome = outcome

    def take(self) -> list[Delta]:
        """Returns the deltas since the last call."""
        taken = []
        while self._deltas:
            taken.append(self._deltas.popleft())
        return taken

    def completion(self) -> ChatCompletion:
        """The completion of a request that has ended. Raises JobError if it failed."""
        assert self.outcome is not None
        if self.outcome.completion is None:
            raise self.outcome.error or JobError("internal", "the request ended with no completion")
        return self.outcome.completion


def streamed(
    request: ChatRequest,
    started: ChatGeneration,
    sink: CollectingSink,
    step: Callable[[], object],
) -> Iterator[ChatChunk]:
    """Step the engine until a request has ended, and yield its chunks as they are generated. It is
    cancelled if the iterator is closed before. `sink`: that of the request, which then has its
    completion. Raises JobError if the request fails."""
    chunks = ChunkBuilder(request.job.id, request.model, int(time.time()))
    try:
        while not started.done:
            step()
            yield from (chunks.chunk([delta]) for delta in sink.take())
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
