"""Runs chat requests: the sequences of their choices, whose token events go into a queue."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from functools import partial

from jobs import clock
from jobs.api.request import ChatRequest
from worker.backend import Sink
from worker.chat.assembly import ChatAssembly, ChatEvents, SequenceEnd
from worker.checkpoint.tokenizer import Tokenizer
from worker.engine.engine import EngineCore
from worker.engine.sequence import Sequence, TokenEvent
from worker.engine.token_ids import token_ids
from worker.sampling.params import SamplingParams
from worker.sampling.prompt_logits import PromptLogprobs
from worker.text.detokenizer import Detokenizer


class ChatGeneration:
    """One request and the sequences of its n choices.

    Owned by the thread that steps the engine, except that `cancel` may be called, and `done` read,
    from any thread. `announce` is called there when the queue of events was empty, and with each
    last event. markers: special tokens that the reader of the answer needs.
    """

    def __init__(
        self,
        request: ChatRequest,
        params: SamplingParams,
        prompt_ids: list[int],
        tokenizer: Tokenizer,
        markers: Collection[str],
        events: ChatEvents,
        announce: Callable[[], None],
        *,
        drafts: bool = False,
    ) -> None:
        self._events, self._announce, self._drafts = events, announce, drafts
        self._first_token_at: float | None = None
        top = request.prompt_logprobs
        self._scores = None if top is None else PromptLogprobs(prompt_ids, top)
        self.sequences = [
            Sequence(
                prompt_ids,
                params,
                choice,
                Detokenizer(tokenizer, skip_special=params.skip_special, shown=markers),
                partial(self._on_token, choice),
                None if choice else self._scores,
                salt=request.cache_salt or "",
                bulk=request.job.priority == "bulk",
                session=request.job.session,
            )
            for choice in range(params.n)
        ]

    @property
    def done(self) -> bool:
        """True if all events are in the queue."""
        return all(sequence.ended for sequence in self.sequences)

    def cancel(self) -> None:
        """Request cancellation of all choices."""
        for sequence in self.sequences:
            sequence.cancel()

    def _on_token(self, choice: int, event: TokenEvent) -> None:
        if self._first_token_at is None and event.sampled is not None:
            self._first_token_at = clock.now()
        events = self._events
        if event.finish_reason is None and event.error is None:
            events.append((choice, event, None))
            # One event alone: the receiver had emptied the queue. Until it empties it again, it
            # takes all that follow.
            if len(events) == 1:
                self._announce()
            return
        events.append((choice, event, self._end_of(choice)))
        if event.error is not None:
            self.cancel()  # one failed choice fails the request
        self._announce()  # always: an announcement may have failed

    def _end_of(self, choice: int) -> SequenceEnd:
        sequence, scores = self.sequences[choice], self._scores
        return SequenceEnd(
            finished_at=clock.now(),
            started_at=sequence.started_at,
            first_token_at=self._first_token_at,
            cached_tokens=sequence.cached_tokens or 0,
            acceptance=sequence.acceptance if self._drafts else None,
            peak_bytes=sequence.peak_bytes,
            prompt_logprobs=scores.positions if scores is not None and not choice else (),
        )


def start_chat(engine: EngineCore, request: ChatRequest, sink: Sink) -> ChatGeneration:
    """Check a request and queue its sequences. `sink` is told on the stepping thread that there are
    events. Raises JobError if the request can't run."""
    engine.require_open()
    if request.prompt_token_ids is not None:
        token_ids(request.prompt_token_ids, engine.vocab_size, "prompt_token_ids")
    prompt = engine.prompts.build(request)  # may take seconds
    engine.prefix.fetch(prompt.token_ids, request.cache_salt)
    engine.require_open()
    constraint = engine.loaded.constraint(request, prompt)  # may take seconds, for the first one
    params = engine.sampling_params(request, prompt.token_ids, constraint)
    make_reader = engine.loaded.reader_maker(request, prompt)
    readers = [make_reader() for _ in range(params.n)]
    events: ChatEvents = deque()
    assembly = ChatAssembly(
        request,
        params,
        prompt.token_ids,
        engine.tokenizer,
        readers,
        events,
        fingerprint=engine.info.fingerprint,
    )
    generation = ChatGeneration(
        request,
        params,
        prompt.token_ids,
        engine.tokenizer,
        readers[0].markers,
        events,
        partial(sink.pending, assembly),
        drafts=engine.speculation.drafts,
    )
    engine.add(generation.sequences)
    return generation
