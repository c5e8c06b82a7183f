"""Makes deltas and the outcome of a chat request from the token events of its choices.

It runs on the thread that receives the answer, since text and log-probabilities cost time that the
engine's thread does not have. A queue of events leads from there; nothing else is shared.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jobs.api.answer import ChatCompletion, PromptLogprob, TokenLogprob, TopLogprob, Usage
from jobs.api.completion import ChoiceParts, completion_of
from jobs.api.message import FunctionCall
from jobs.api.request import ChatRequest
from jobs.errors import JobError, failure_of
from jobs.stream.delta import Delta
from worker.backend import Outcome, Progress
from worker.checkpoint.tokenizer import Tokenizer
from worker.engine.sequence import TokenEvent
from worker.sampling.params import SamplingParams
from worker.sampling.prompt_logits import TokenScore
from worker.sampling.sampler import Sampled
from worker.speculative.acceptance import Acceptance
from worker.text.answer_reader import AnswerReader

logger = logging.getLogger(__name__)


class SequenceEnd(NamedTuple):
    """The figures of a sequence that has ended. Times are seconds since the epoch."""

    finished_at: float
    started_at: float | None  # None: it was never admitted to the batch
    first_token_at: float | None  # of the request
    cached_tokens: int  # of the prompt
    acceptance: Acceptance | None  # None: the model runs without a draft
    peak_bytes: int = 0  # of memory in use; 0: it was in no step
    prompt_logprobs: Sequence[Sequence[TokenScore]] = ()  # at each position, if it collected them


# Events of a request's sequences, in order: the choice, the event, and with the last event its end.
ChatEvents = deque[tuple[int, TokenEvent, SequenceEnd | None]]


@dataclass(kw_only=True)
class ChoiceState(ChoiceParts):
    """The output of one choice so far."""

    reader: AnswerReader
    reasoning_tokens: int = 0
    end: SequenceEnd | None = None

    def runs(self, events: list[TokenEvent]) -> Iterator[tuple[list[TokenEvent], str]]:
        """Yield events with their text in runs. Each run is to be added before the next one is
        taken."""
        text = "".join([event.text for event in events])
        if len(events) == 1 or self.reader.steady(text):
            yield events, text
            return
        half = len(events) // 2
        yield from self.runs(events[:half])
        yield from self.runs(events[half:])

    def add(self, events: list[TokenEvent], text: str, logprobs: list[TokenLogprob]) -> Delta:
        """Append a run of events; returns what they added."""
        ids = [event.sampled.token_id for event in events if event.sampled is not None]
        before = self.reader.reasons
        self.token_ids += ids
        part = self.reader.push(text, last=events[-1].last)
        if before and self.reader.reasons:  # the marks around it are none of its tokens
            self.reasoning_tokens += len(ids)
        calls = tuple(
            [
                self.add_call(FunctionCall(name=call.name, arguments=call.arguments))
                for call in part.calls
            ]
        )
        self.content.append(part.content)
        self.reasoning.append(part.reasoning)
        self.finish(events[-1].finish_reason)
        self.logprobs += logprobs
        return Delta(
            self.index, part.content, part.reasoning, (*logprobs,), self.finish_reason, calls
        )


def _sum(details: list[Usage.CompletionDetails]) -> Usage.CompletionDetails:
    """The figures of all choices together."""
    figures = [one.to_dict() for one in details]
    return Usage.CompletionDetails(
        **{name: sum(one[name] for one in figures) for name in figures[0]}
    )


class ChatAssembly:
    """Implements `worker.backend.Assembly` for a chat request with one of `readers` per choice."""

    def __init__(
        self,
        request: ChatRequest,
        params: SamplingParams,
        prompt_ids: list[int],
        tokenizer: Tokenizer,
        readers: Sequence[AnswerReader],
        events: ChatEvents,
        *,
        fingerprint: str,
    ) -> None:
        self._request, self._params, self._prompt_ids = request, params, prompt_ids
        self._tokenizer, self._fingerprint = tokenizer, fingerprint
        self._events = events
        self._created = int(time.time())
        name = request.job.id or uuid.uuid4().hex
        self._choices = [
            ChoiceState(index=i, job=name, reader=reader) for i, reader in enumerate(readers)
        ]
        self._unfinished = params.n  # choices
        self._error: JobError | None = None  # the first one of a choice
        self._ended = False
        self._busy = False  # within `take`, or it was interrupted there

    def take(self) -> Progress:
        if self._ended:
            self._events.clear()
            return Progress()
        deltas: list[Delta] = []
        try:
            if self._busy:
                raise JobError("internal", "the process was interrupted")
            self._busy = True
            outcome = self._assemble(self._take_events(), deltas)
        except BaseException as error:  # it fails this request only
            reason = failure_of(error)
            logger.exception("a response could not be assembled")
            fact = f"the response could not be assembled: {reason.message}"
            outcome = Outcome(error=JobError("internal", fact))
        self._ended, self._busy = outcome is not None, False
        return Progress(deltas, outcome)

    def _take_events(self) -> dict[int, list[TokenEvent]]:
        """Remove the events from the queue until it is empty, so that the next one is announced;
        returns them by choice."""
        queue = self._events
        found: dict[int, list[TokenEvent]] = {}
        while queue:
            choice, event, end = queue.popleft()
            found.setdefault(choice, []).append(event)
            if end is not None:
                self._choices[choice].end = end
                self._unfinished -= 1
                self._error = self._error or event.error
        return found

    def _assemble(self, found: dict[int, list[TokenEvent]], deltas: list[Delta]) -> Outcome | None:
        """Append what the events add to `deltas`. Returns the outcome after the last one."""
        for number, events in found.items():
            choice = self._choices[number]
            for run, text in choice.runs(events):
                delta = self._add(choice, run, text)
                if delta is not None:
                    deltas.append(delta)
        return self._outcome() if self._unfinished == 0 else None

    def _add(self, choice: ChoiceState, events: list[TokenEvent], text: str) -> Delta | None:
        """The delta of a run of events; None if nothing of it is to be shown."""
        sampled = [event.sampled for event in events if event.sampled is not None]
        logprobs = [self._logprob(one) for one in sampled if one.logprob is not None]
        delta = choice.add(events, text, logprobs)
        if self._request.return_token_ids:
            ids = [one.token_id for one in sampled]
            begins = choice.index == 0 and len(choice.token_ids) == len(ids)
            prompt = tuple(self._prompt_ids) if begins else ()
            delta = delta._replace(token_ids=tuple(ids), prompt_token_ids=prompt)
        visible = delta.content or delta.reasoning or delta.tool_calls or delta.token_ids
        return delta if visible or logprobs or delta.finish_reason else None

    def _outcome(self) -> Outcome:
        ends = [choice.end for choice in self._choices if choice.end is not None]
        details = [self._details(*pair) for pair in zip(self._choices, ends, strict=True)]
        completion = self._completion(_sum(details), ends)
        failed = self._error is not None
        started = [end.started_at for end in ends if end.started_at is not None]
        first_tokens = [end.first_token_at for end in ends if end.first_token_at is not None]
        return Outcome(
            result=None if failed else completion,
            error=self._error,
            partial=completion if failed else None,
            prompt_token_ids=self._prompt_ids,
            output_token_ids=[choice.token_ids for choice in self._choices],
            token_logprobs=[[lp.logprob for lp in choice.logprobs] for choice in self._choices],
            details=details,
            seed=self._params.seed,
            started_at=min(started, default=None),
            first_token_at=min(first_tokens, default=None),
            finished_at=max(end.finished_at for end in ends),
            sampling=self._params.as_sampling(),
        )

    def _completion(
        self, details: Usage.CompletionDetails, ends: Sequence[SequenceEnd]
    ) -> ChatCompletion:
        prompt = len(self._prompt_ids)
        generated = sum(len(choice.token_ids) for choice in self._choices)
        return completion_of(
            self._request,
            self._created,
            self._choices,
            usage=Usage(
                prompt_tokens=prompt,
                completion_tokens=generated,
                total_tokens=prompt + generated,
                prompt_tokens_details=Usage.PromptDetails(
                    cached_tokens=min(end.cached_tokens for end in ends)
                ),
                completion_tokens_details=details,
                peak_memory_mb=Usage.in_mb(max(end.peak_bytes for end in ends)),
            ),
            fingerprint=self._fingerprint,
            prompt_token_ids=self._prompt_ids,
            prompt_logprobs=self._scored_prompt(ends[0]),
        )

    def _details(self, choice: ChoiceState, end: SequenceEnd) -> Usage.CompletionDetails:
        details = Usage.CompletionDetails(reasoning_tokens=choice.reasoning_tokens)
        figures = end.acceptance
        if figures is not None:
            details.accepted_prediction_tokens = figures.accepted
            details.rejected_prediction_tokens = figures.drafted - figures.accepted
            details.prediction_steps = figures.steps
        return details

    def _scored_prompt(self, end: SequenceEnd) -> list[dict[str, PromptLogprob] | None] | None:
        if self._request.prompt_logprobs is None:
            return None
        scored: list[dict[str, PromptLogprob] | None] = [None]
        for scores in end.prompt_logprobs:
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
