"""The replies that a test may give a `FakeWorker`, and the steps that the worker makes of one.

A token is a word with the white space after it, so that streams and token counts are the same in
every run. A reply becomes a `Plan`: one group of deltas per step, and at the end a completion or an
error.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, cast, get_args

from pydantic import ValidationError

from jobs.api.answer import (
    AssistantMessage,
    ChatCompletion,
    Choice,
    ChoiceLogprobs,
    FinishReason,
    Usage,
    completion_id,
)
from jobs.api.message import SentToolCall, ToolCall
from jobs.api.request import ChatRequest
from jobs.api.wire import describe, to_invalid_request
from jobs.errors import JobError, failure_of
from jobs.sizes import counted
from jobs.stream.delta import Delta

_WORD = re.compile(r"\s*\S+\s*|\s+")


@dataclass(frozen=True)
class Answer:
    """One scripted answer, or one choice of it.

    A string is split into words; a list of strings is taken as the chunks of the stream. Each word
    or chunk is one token. With `error`, the job fails after the text.
    """

    content: str | Sequence[str] = ""
    reasoning: str | Sequence[str] = ""
    tool_calls: Sequence[ToolCall | Mapping[str, Any]] = ()
    finish_reason: FinishReason | None = None  # None: tool_calls if there are any, else stop
    error: JobError | None = None
    delay: float = 0.0  # seconds until the first token; math.inf: the job never ends

    def __post_init__(self) -> None:
        """Raises TypeError or ValueError: a mistake in a test is reported where it is made."""
        for name, text in (("content", self.content), ("reasoning", self.reasoning)):
            if not _is_text(text):
                raise TypeError(
                    f"{name}: expected a string or a list of strings, got {describe(text)}"
                )
        if self.error is not None and not isinstance(self.error, JobError):
            raise TypeError(f"error: expected a JobError, got {describe(self.error)}")
        reasons = get_args(FinishReason)
        if self.finish_reason is not None and self.finish_reason not in reasons:
            names = " or ".join((", ".join(map(repr, reasons[:-1])), repr(reasons[-1])))
            raise ValueError(f"finish_reason: must be {names}, got {describe(self.finish_reason)}")
        if not self.delay >= 0:
            raise ValueError(f"delay: must be at least 0, got {self.delay}")
        for number, call in enumerate(self.tool_calls):
            try:
                _call(call)
            except ValidationError as error:
                fault = to_invalid_request(error, SentToolCall).message
                raise ValueError(f"tool_calls[{number}]: {fault}") from None


# The answer to one request. A sequence has one element per choice (`n`); anything else is the
# answer of every choice. An exception is the error of the job.
Reply = str | Answer | ChatCompletion | Exception | Sequence[str | Answer]


def check_reply(reply: Any) -> Reply:
    """The reply, if it is one. Raises TypeError."""
    several = isinstance(reply, Sequence) and not isinstance(reply, str | bytes)
    for one in reply if several else [reply]:
        single = (str, Answer) if several else (str, Answer, ChatCompletion, Exception)
        if not isinstance(one, single):
            raise TypeError(
                "a FakeWorker's answer must be a string, an Answer, a ChatCompletion, an exception "
                f"or a list of strings and Answers, one per choice; got {describe(one)}"
            )
    return cast(Reply, reply)


def _is_text(text: Any) -> bool:
    if isinstance(text, str):
        return True
    return isinstance(text, Sequence) and all(isinstance(token, str) for token in text)


@dataclass(frozen=True)
class _Choice:
    """One choice, in tokens. Its reasoning comes before its content."""

    index: int
    reasoning: Sequence[str]
    content: Sequence[str]
    tool_calls: list[ToolCall] | None
    finish_reason: FinishReason
    logprobs: ChoiceLogprobs | None = None

    def deltas(self, finishes: bool) -> Iterator[Delta]:
        """One delta per token; the last one has the finish reason if the choice finishes.

        Tool calls are not in the stream's log: followers receive them with the finish reason.
        """
        reason = self.finish_reason if finishes and not self.tool_calls else None
        deltas = [Delta(self.index, reasoning=token) for token in self.reasoning]
        deltas += [Delta(self.index, content=token) for token in self.content]
        if reason is None:
            yield from deltas
            return
        *before, last = deltas or [Delta(self.index)]
        yield from before
        yield Delta(self.index, last.content, last.reasoning, finish_reason=reason)

    def first(self, count: int) -> _Choice:
        """The choice as it is after `count` tokens, without the tool calls."""
        content = max(0, count - len(self.reasoning))
        return _Choice(self.index, self.reasoning[:count], self.content[:content], None, "stop")

    def answer(self) -> Choice:
        content = "".join(self.content)
        message = AssistantMessage(
            content=None if self.tool_calls and not content else content,
            reasoning_content="".join(self.reasoning) or None,
            tool_calls=self.tool_calls,
        )
        return Choice(
            index=self.index,
            message=message,
            finish_reason=self.finish_reason,
            logprobs=self.logprobs,
        )


class Plan:
    """The steps of one attempt at a job."""

    def __init__(self, request: ChatRequest, job_id: str, reply: Reply) -> None:
        self._request, self._job_id = request, job_id
        self._created = int(time.time())
        self._usage: Usage | None = None
        self.error: JobError | None = None
        self.delay = 0.0
        self._choices: list[_Choice] = self._read(reply)
        finishes = self.error is None
        streams = [choice.deltas(finishes) for choice in self._choices]
        self.steps: list[tuple[Delta, ...]] = [
            tuple(delta for delta in step if delta is not None) for step in zip_longest(*streams)
        ]

    @property
    def completion(self) -> ChatCompletion:
        """The whole answer."""
        return self._completion(self._choices, self._usage)

    def partial(self, steps: int) -> ChatCompletion:
        """The completion after this many steps, for a job that fails or is stopped."""
        return self._completion([choice.first(steps) for choice in self._choices], None)

    def _read(self, reply: Reply) -> list[_Choice]:
        check_reply(reply)
        if isinstance(reply, Exception):
            self.error = failure_of(reply)
            return []
        if isinstance(reply, ChatCompletion):
            self._usage = reply.usage
            return [_from_choice(choice) for choice in reply.choices]
        n = self._request.n or 1
        answers = [reply] * n if isinstance(reply, str | Answer) else list(reply)
        if len(answers) != n:
            raise AssertionError(
                f"the FakeWorker has {counted(len(answers), 'choice')} for a request with n={n}"
            )
        given = [Answer(one) if isinstance(one, str) else one for one in answers]
        self.error = next((one.error for one in given if one.error is not None), None)
        self.delay = max(one.delay for one in given)
        return [_from_answer(index, one) for index, one in enumerate(given)]

    def _completion(self, choices: Sequence[_Choice], usage: Usage | None) -> ChatCompletion:
        return ChatCompletion(
            id=completion_id(self._job_id),
            created=self._created,
            model=self._request.model,
            choices=[choice.answer() for choice in choices],
            usage=usage or self._count(choices),
        )

    def _count(self, choices: Sequence[_Choice]) -> Usage:
        prompt = sum(len(_words(message.text)) for message in self._request.messages)
        reasoning = sum(len(choice.reasoning) for choice in choices)
        generated = reasoning + sum(len(choice.content) for choice in choices)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=generated,
            total_tokens=prompt + generated,
            completion_tokens_details=Usage.CompletionDetails(reasoning_tokens=reasoning),
        )


def _from_answer(index: int, answer: Answer) -> _Choice:
    calls = [_call(call) for call in answer.tool_calls] or None
    reason = answer.finish_reason or ("tool_calls" if calls else "stop")
    return _Choice(index, _words(answer.reasoning), _words(answer.content), calls, reason)


def _call(call: ToolCall | Mapping[str, Any]) -> ToolCall:
    """A call of an answer. Raises ValidationError, also for an unknown field."""
    return call if isinstance(call, ToolCall) else SentToolCall.model_validate(call)


def _from_choice(choice: Choice) -> _Choice:
    message = choice.message
    return _Choice(
        choice.index,
        _words(message.reasoning_content or ""),
        _words(message.content or ""),
        message.tool_calls,
        choice.finish_reason,
        choice.logprobs,
    )


def _words(text: str | Sequence[str]) -> list[str]:
    return _WORD.findall(text) if isinstance(text, str) else list(text)
