"""A chat request under way: the steps of its choices become pieces, and at the end an outcome."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from jobs.api.answer import (
    AssistantMessage,
    ChatCompletion,
    Choice,
    ChoiceLogprobs,
    FinishReason,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from jobs.api.request import ChatRequest
from jobs.errors import JobError
from jobs.stream.delta import Delta
from worker.backend import Outcome, Sink
from worker.engine.sampler import Sampled
from worker.engine.sampling_plan import SamplingPlan
from worker.engine.sequence import Sequence, TokenEvent
from worker.loading.tokenizer import Tokenizer
from worker.text.reasoning import ReasoningSplitter

logger = logging.getLogger(__name__)


@dataclass
class ChoiceState:
    """What one choice has said so far."""

    index: int
    splitter: ReasoningSplitter | None
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    reasoning_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def take(self, step: TokenEvent, logprob: TokenLogprob | None) -> Delta:
        """Add a step; returns what is new."""
        content, reasoning = step.text, ""
        if self.splitter is not None:
            thinking = self.splitter.inside
            content, reasoning = self.splitter.push(step.text)
            if step.last:
                more_content, more_reasoning = self.splitter.flush()
                content, reasoning = content + more_content, reasoning + more_reasoning
            self.reasoning_tokens += thinking and step.sampled is not None
        if step.sampled is not None:
            self.token_ids.append(step.sampled.token_id)
        if logprob is not None:
            self.logprobs.append(logprob)
        self.content.append(content)
        self.reasoning.append(reasoning)
        self.finish_reason = step.finish_reason
        new = (logprob,) if logprob is not None else ()
        return Delta(self.index, content, reasoning, new, step.finish_reason)

    def message(self) -> AssistantMessage:
        return AssistantMessage(
            content="".join(self.content), reasoning_content="".join(self.reasoning) or None
        )


class ChatGeneration:
    """One request with its n choices. Lives on the engine's thread; `cancel` may come from any."""

    def __init__(
        self,
        request: ChatRequest,
        plan: SamplingPlan,
        prompt_ids: list[int],
        tokenizer: Tokenizer,
        make_splitter: Callable[[], ReasoningSplitter] | None,
        sink: Sink,
        *,
        fingerprint: str,
    ) -> None:
        self.done = False
        self._request, self._plan, self._prompt_ids = request, plan, prompt_ids
        self._tokenizer, self._sink = tokenizer, sink
        self._fingerprint = fingerprint
        self._created = int(time.time())
        self._choices = [
            ChoiceState(i, make_splitter() if make_splitter else None) for i in range(plan.n)
        ]
        self._sequences: list[Sequence] = []
        self._open = plan.n
        self._error: JobError | None = None
        self._first_token_at: float | None = None

    def attach(self, sequences: list[Sequence]) -> None:
        """The sequences that generate the choices, in order."""
        self._sequences = sequences

    def cancel(self) -> None:
        for sequence in self._sequences:
            sequence.cancel()

    def listener(self, choice: int) -> Callable[[TokenEvent], None]:
        """What the sequence of this choice reports to."""

        def listen(step: TokenEvent) -> None:
            self._listen(self._choices[choice], step)

        return listen

    def _listen(self, choice: ChoiceState, step: TokenEvent) -> None:
        if self.done:
            return
        try:
            self._take(choice, step)
        except Exception as error:  # a defect of ours: this request ends by it, and no other
            logger.exception("the answer of a request could not be put together")
            self.done = True
            self.cancel()
            fact = f"the answer can't be put together: {type(error).__name__}: {error}"
            self._sink.ended(Outcome(error=JobError("internal", fact)))

    def _take(self, choice: ChoiceState, step: TokenEvent) -> None:
        if self._first_token_at is None and step.sampled is not None:
            self._first_token_at = time.time()
        logprob = None
        if step.sampled is not None and step.sampled.logprob is not None:
            logprob = self._logprob(step.sampled)
        piece = choice.take(step, logprob)
        if piece.content or piece.reasoning or piece.logprobs or piece.finish_reason:
            self._sink.deltas((piece,))
        if not step.last:
            return
        self._open -= 1
        if step.error is not None and self._error is None:
            self._error = step.error
            self.cancel()  # one failed choice fails the request
        if self._open == 0:
            self.done = True
            self._sink.ended(self._outcome())

    def _outcome(self) -> Outcome:
        answer = self._completion()
        failed = self._error is not None
        started = [s.started_at for s in self._sequences if s.started_at is not None]
        return Outcome(
            completion=None if failed else answer,
            error=self._error,
            partial=answer if failed else None,
            prompt_token_ids=self._prompt_ids,
            output_token_ids=[choice.token_ids for choice in self._choices],
            token_logprobs=[[lp.logprob for lp in choice.logprobs] for choice in self._choices],
            seed=self._plan.seed,
            started_at=min(started, default=None),
            first_token_at=self._first_token_at,
            finished_at=time.time(),
            sampling=self._plan.as_sampling(),
        )

    def _completion(self) -> ChatCompletion:
        prompt = len(self._prompt_ids)
        generated = sum(len(choice.token_ids) for choice in self._choices)
        thought = sum(choice.reasoning_tokens for choice in self._choices)
        return ChatCompletion(
            id=f"chatcmpl-{self._request.job.id}" if self._request.job.id else "chatcmpl-local",
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
                completion_tokens_details=Usage.CompletionDetails(reasoning_tokens=thought),
            ),
            system_fingerprint=self._fingerprint,
        )

    def _logprob(self, sampled: Sampled) -> TokenLogprob:
        assert sampled.logprob is not None
        top = [TopLogprob(**self._token(i), logprob=value) for i, value in sampled.top]
        return TokenLogprob(
            **self._token(sampled.token_id), logprob=sampled.logprob, top_logprobs=top
        )

    def _token(self, token_id: int) -> dict[str, object]:
        raw = self._tokenizer.token_bytes(token_id)
        return {"token": raw.decode("utf-8", errors="replace"), "bytes": list(raw)}
