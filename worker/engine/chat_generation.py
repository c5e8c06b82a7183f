"""A running chat request: token events of its choices become deltas, and at the end an outcome."""

from __future__ import annotations

import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b

from jobs import clock
from jobs.api.answer import (
    AssistantMessage,
    ChatCompletion,
    Choice,
    ChoiceLogprobs,
    FinishReason,
    PromptLogprob,
    TokenLogprob,
    TopLogprob,
    Usage,
    completion_id,
)
from jobs.api.chunk import ToolCallDelta
from jobs.api.message import FunctionCall, ToolCall
from jobs.api.request import ChatRequest
from jobs.errors import JobError, failure_of
from jobs.stream.delta import Delta
from worker.backend import Outcome, Sink
from worker.engine.prompt_logprobs import PromptLogprobs, TokenScore
from worker.engine.sampler import Sampled
from worker.engine.sampling_plan import SamplingPlan
from worker.engine.sequence import Sequence, TokenEvent
from worker.loading.tokenizer import Tokenizer
from worker.text.answer import AnswerReader
from worker.text.detokenizer import Detokenizer
from worker.text.tool_call import Call

logger = logging.getLogger(__name__)


@dataclass
class ChoiceState:
    """The output of one choice so far."""

    index: int
    reader: AnswerReader
    name: str  # of the job, for the ids of calls
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    tool_calls: list[ToolCallDelta] = field(default_factory=list)
    reasoning_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    events: deque[TokenEvent] = field(default_factory=deque)  # that are not delivered yet

    def runs(self) -> Iterator[tuple[list[TokenEvent], str]]:
        """Remove the events, and yield them with their text in runs. Each run is to be added before
        the next one is taken."""
        events = [self.events.popleft() for _ in range(len(self.events))]
        if events:
            yield from self._runs(events)

    def _runs(self, events: list[TokenEvent]) -> Iterator[tuple[list[TokenEvent], str]]:
        text = "".join([event.text for event in events])
        if len(events) == 1 or self.reader.steady(text):
            yield events, text
            return
        half = len(events) // 2
        yield from self._runs(events[:half])
        yield from self._runs(events[half:])

    def add(self, events: list[TokenEvent], text: str, logprobs: list[TokenLogprob]) -> Delta:
        """Append a run of events; returns what they added."""
        ids = [event.sampled.token_id for event in events if event.sampled is not None]
        self.reasoning_tokens += len(ids) * self.reader.reasons
        self.token_ids += ids
        part = self.reader.push(text, last=events[-1].last)
        calls: tuple[ToolCallDelta, ...] = ()
        if part.calls:
            first = len(self.tool_calls)
            calls = tuple([self._call(call, i) for i, call in enumerate(part.calls, first)])
            self.tool_calls += calls
        self.content.append(part.content)
        self.reasoning.append(part.reasoning)
        self.finish_reason = events[-1].finish_reason
        if self.tool_calls and self.finish_reason == "stop":
            self.finish_reason = "tool_calls"
        self.logprobs += logprobs
        return Delta(
            self.index, part.content, part.reasoning, (*logprobs,), self.finish_reason, calls
        )

    def _call(self, call: Call, index: int) -> ToolCallDelta:
        """A call with an id that it has in each attempt of its job: streams that go on with another
        attempt compare it."""
        digest = blake2b(f"{self.name}:{self.index}:{index}".encode(), digest_size=12)
        function = FunctionCall(name=call.name, arguments=call.arguments)
        return ToolCallDelta(id=f"call_{digest.hexdigest()}", function=function, index=index)

    def message(self) -> AssistantMessage:
        content = "".join(self.content)
        return AssistantMessage(
            content=None if self.tool_calls and not content else content,
            reasoning_content="".join(self.reasoning) or None,
            tool_calls=[ToolCall(id=c.id, function=c.function) for c in self.tool_calls] or None,
        )


def _sum(details: list[Usage.CompletionDetails]) -> Usage.CompletionDetails:
    """The figures of all choices together."""
    figures = [one.to_dict() for one in details]
    return Usage.CompletionDetails(
        **{name: sum(one[name] for one in figures) for name in figures[0]}
    )


class ChatGeneration:
    """One request and the sequences of its n choices.

    Its events arrive on the thread that steps the engine, which only keeps them. `deliver` makes
    deltas of them, on the thread that the sink chooses. `cancel` may be called from any thread.
    """

    def __init__(
        self,
        request: ChatRequest,
        plan: SamplingPlan,
        prompt_ids: list[int],
        tokenizer: Tokenizer,
        make_reader: Callable[[], AnswerReader],
        sink: Sink,
        *,
        fingerprint: str,
        drafts: bool = False,
    ) -> None:
        self.done = False
        self._request, self._plan, self._prompt_ids = request, plan, prompt_ids
        self._tokenizer, self._sink = tokenizer, sink
        self._fingerprint, self._drafts = fingerprint, drafts
        self._created = int(time.time())
        name = request.job.id or uuid.uuid4().hex
        self._choices = [ChoiceState(i, make_reader(), name) for i in range(plan.n)]
        top = request.prompt_logprobs
        self._prompt_logprobs = None if top is None else PromptLogprobs(prompt_ids, top)
        self.sequences = [
            Sequence(
                prompt_ids,
                plan,
                choice.index,
                Detokenizer(tokenizer, skip_special=plan.skip_special, shown=choice.reader.markers),
                partial(self._on_token, choice),
                self._prompt_logprobs if choice.index == 0 else None,
                salt=request.cache_salt or "",
                bulk=request.job.priority == "bulk",
                session=request.job.session,
            )
            for choice in self._choices
        ]
        self._unfinished = plan.n  # choices
        self._error: JobError | None = None
        self._first_token_at: float | None = None
        self._finished_at: float | None = None
        self._announced = False  # the sink knows that there are events

    def cancel(self) -> None:
        """Request cancellation of all choices."""
        for sequence in self.sequences:
            sequence.cancel()

    def deliver(self) -> None:
        """Pass the events that have come to the sink, as deltas and at last the outcome."""
        self._announced = False  # first: what comes from now on is announced again
        try:
            for choice in self._choices:
                for events, text in choice.runs():
                    if not self.done:
                        self._add(choice, events, text)
        except BaseException as error:  # it fails this request only
            reason = failure_of(error)
            logger.exception("a response could not be assembled")
            self.cancel()
            fact = f"the response could not be assembled: {reason.message}"
            self._end(Outcome(error=JobError("internal", fact)))

    def _on_token(self, choice: ChoiceState, event: TokenEvent) -> None:
        if self._first_token_at is None and event.sampled is not None:
            self._first_token_at = clock.now()
        if event.last:
            self._finished_at = clock.now()
        choice.events.append(event)
        if event.error is not None and self._error is None:
            self._error = event.error
            self.cancel()  # one failed choice fails the request
        if event.last or not self._announced:  # the last one always: `pending` may have failed
            self._announced = True
            self._sink.pending(self.deliver)

    def _add(self, choice: ChoiceState, events: list[TokenEvent], text: str) -> None:
        sampled = [event.sampled for event in events if event.sampled is not None]
        logprobs = [self._logprob(one) for one in sampled if one.logprob is not None]
        delta = choice.add(events, text, logprobs)
        visible = delta.content or delta.reasoning or delta.tool_calls
        if visible or logprobs or delta.finish_reason:
            self._sink.deltas((delta,))
        self._unfinished -= events[-1].last
        if self._unfinished == 0:
            self._end(self._outcome())

    def _end(self, outcome: Outcome) -> None:
        try:
            self._sink.ended(outcome)
        finally:
            self.done = True  # last: another thread may wait for it, then read the outcome

    def _outcome(self) -> Outcome:
        details = [self._details(*pair) for pair in zip(self._choices, self.sequences, strict=True)]
        completion = self._completion(_sum(details))
        failed = self._error is not None
        started = [s.started_at for s in self.sequences if s.started_at is not None]
        return Outcome(
            completion=None if failed else completion,
            error=self._error,
            partial=completion if failed else None,
            prompt_token_ids=self._prompt_ids,
            output_token_ids=[choice.token_ids for choice in self._choices],
            token_logprobs=[[lp.logprob for lp in choice.logprobs] for choice in self._choices],
            details=details,
            seed=self._plan.seed,
            started_at=min(started, default=None),
            first_token_at=self._first_token_at,
            finished_at=self._finished_at,
            sampling=self._plan.as_sampling(),
        )

    def _completion(self, details: Usage.CompletionDetails) -> ChatCompletion:
        prompt = len(self._prompt_ids)
        generated = sum(len(choice.token_ids) for choice in self._choices)
        return ChatCompletion(
            id=completion_id(self._request.job.id),
            created=self._created,
            model=self._request.model,
            choices=[
                Choice(
                    index=choice.index,
                    message=choice.message(),
                    finish_reason=choice.finish_reason or "stop",
                    logprobs=ChoiceLogprobs(content=choice.logprobs)
                    if self._plan.logprobs
                    else None,
                )
                for choice in self._choices
            ],
            usage=Usage(
                prompt_tokens=prompt,
                completion_tokens=generated,
                total_tokens=prompt + generated,
                prompt_tokens_details=Usage.PromptDetails(
                    cached_tokens=min(one.cached_tokens or 0 for one in self.sequences)
                ),
                completion_tokens_details=details,
            ),
            system_fingerprint=self._fingerprint,
            prompt_logprobs=self._scored_prompt(),
        )

    def _details(self, choice: ChoiceState, sequence: Sequence) -> Usage.CompletionDetails:
        details = Usage.CompletionDetails(reasoning_tokens=choice.reasoning_tokens)
        if self._drafts:
            figures = sequence.acceptance
            details.accepted_prediction_tokens = figures.accepted
            details.rejected_prediction_tokens = figures.drafted - figures.accepted
            details.prediction_steps = figures.steps
        return details

    def _scored_prompt(self) -> list[dict[str, PromptLogprob] | None] | None:
        if self._prompt_logprobs is None:
            return None
        scored: list[dict[str, PromptLogprob] | None] = [None]
        for scores in self._prompt_logprobs.positions:
            scored.append({str(one.token_id): self._prompt_logprob(one) for one in scores})
        return scored

    def _prompt_logprob(self, score: TokenScore) -> PromptLogprob:
        raw = self._tokenizer.token_bytes(score.token_id)
        text = raw.decode("utf-8", errors="replace")
        return PromptLogprob(logprob=score.logprob, rank=score.rank, decoded_token=text)

    def _logprob(self, sampled: Sampled) -> TokenLogprob:
        assert sampled.logprob is not None
        top = [TopLogprob(**self._token(i), logprob=value) for i, value in sampled.top]
        return TokenLogprob(
            **self._token(sampled.token_id), logprob=sampled.logprob, top_logprobs=top
        )

    def _token(self, token_id: int) -> dict[str, object]:
        raw = self._tokenizer.token_bytes(token_id)
        return {"token": raw.decode("utf-8", errors="replace"), "bytes": list(raw)}
