"""The answer of an upstream, put together from the chunks of its stream.

Each server has its own habits: what they share is taken, and what can't be read is an error of this
request alone.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jobs import clock
from jobs.api.answer import (
    ChatCompletion,
    FinishReason,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from jobs.api.chunk import ToolCallDelta
from jobs.api.completion import ChoiceParts, completion_of
from jobs.api.message import FunctionCall
from jobs.api.request import ChatRequest
from jobs.encoding import encodable, from_json, to_json
from jobs.errors import JobError, invalid
from jobs.stream.delta import Delta
from worker.backend import Outcome
from worker.upstream.faults import fault_in_stream

REASONS: dict[str, FinishReason] = {
    "stop": "stop",
    "eos": "stop",
    "eos_token": "stop",
    "stop_sequence": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
}
MAX_TEXT = 200  # characters of a chunk in an error


def broken(fact: str) -> JobError:
    """The error about an answer that can't be read."""
    return JobError("internal", f"the upstream's answer can't be read: {fact}")


@dataclass
class Call:
    """A tool call, of which parts arrive."""

    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class ChoiceState(ChoiceParts):
    """The output of one choice so far."""

    open_call: Call | None = None
    open_number: int = -1  # of the open call, as the upstream counts
    streamed_ids: int = 0  # of token_ids


class Answer:
    """The answer to one request. Used by the upstream's thread. Times are those of jobs.clock."""

    def __init__(self, request: ChatRequest) -> None:
        self._request = request
        name = request.job.id or uuid.uuid4().hex
        self._created = int(time.time())
        self._choices = [ChoiceState(index=number, job=name) for number in range(request.n or 1)]
        self._usage: Usage | None = None
        self._fingerprint: str | None = None
        self._prompt_ids: list[int] = []
        self.tokens = 0  # chunks with output, until the upstream says how many tokens
        self.started_at: float | None = None  # the request was sent
        self.first_token_at: float | None = None

    @property
    def begun(self) -> bool:
        """True if something of it has arrived."""
        return self.first_token_at is not None

    def add(self, data: bytes) -> list[Delta]:
        """Append a chunk; returns what it adds. Raises JobError if it is an error, or can't be
        read."""
        try:
            chunk = from_json(data)
        except (ValueError, RecursionError):
            raise broken(f"a chunk is not JSON: {_shown(data)}") from None
        if not isinstance(chunk, dict):
            raise broken(f"a chunk is no JSON object: {_shown(data)}")
        if chunk.get("error"):
            raise fault_in_stream(chunk["error"])
        if isinstance(chunk.get("system_fingerprint"), str):
            self._fingerprint = encodable(chunk["system_fingerprint"])
        self._count(chunk.get("usage"))
        choices = chunk.get("choices")
        if choices is None:
            return []
        try:
            self._prompt_ids += _ids(chunk.get("prompt_token_ids"))
            return [
                delta
                for choice in choices
                if (delta := self._add(self._choice(choice), choice)) is not None
            ]
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            raise broken(f"{type(error).__name__}: {error} in {_shown(data)}") from None

    def check(self, *, done: bool) -> None:
        """Raise JobError unless all choices have ended. `done`: the upstream says that nothing
        follows; else its connection was lost, if something is missing."""
        missing = [one.index for one in self._choices if one.finish_reason is None]
        if not missing:
            return
        if not done:
            raise lost(self, "it closed the connection")
        if len(missing) < len(self._choices):
            raise invalid(
                f"n: the upstream returned {len(self._choices) - len(missing)} of "
                f"{len(self._choices)} answers: ask for one, or send several requests",
                "n",
            )
        if self.begun:
            fact = "the upstream interrupted the answer: it ended without a finish_reason"
            raise JobError("unavailable", fact)
        raise broken("it ended without a finish_reason")

    def outcome(self, error: JobError | None) -> Outcome:
        """The outcome at this moment."""
        completion = self._completion()
        details = completion.usage and completion.usage.completion_tokens_details
        return Outcome(
            result=completion if error is None else None,
            error=error,
            partial=completion if error is not None and self.begun else None,
            # Of several choices, the upstream has said the sum only.
            details=[details] if details and len(self._choices) == 1 else [],
            seed=self._request.seed,
            started_at=self.started_at,
            first_token_at=self.first_token_at,
            finished_at=clock.now(),
            sampling=self._request.sampling(),
        )

    def _completion(self) -> ChatCompletion:
        return completion_of(
            self._request,
            self._created,
            self._choices,
            usage=self._usage,
            fingerprint=self._fingerprint,
            prompt_token_ids=self._prompt_ids,
        )

    def _choice(self, choice: Mapping[str, Any]) -> ChoiceState:
        number = choice.get("index") or 0
        if not 0 <= number < len(self._choices):
            raise ValueError(f"choice {number} of {len(self._choices)}")
        return self._choices[number]

    def _add(self, choice: ChoiceState, chunk: Mapping[str, Any]) -> Delta | None:
        """What a chunk adds to a choice; None if that is nothing."""
        delta = chunk.get("delta") or {}
        content = _text(delta.get("content"))
        # vLLM and others have renamed the field.
        reasoning = _text(delta.get("reasoning_content")) or _text(delta.get("reasoning"))
        refusal = _text(delta.get("refusal"))
        logprobs = tuple(_logprobs(chunk.get("logprobs")))
        choice.token_ids += _ids(chunk.get("token_ids"))
        calls = self._fragments(choice, delta.get("tool_calls") or ())
        reason = chunk.get("finish_reason")
        if reason is not None:
            calls += self._close(choice)
            choice.finish(self._reason(reason))
        ids, prompt = self._new_ids(choice)
        shown = content or reasoning or logprobs or calls or reason or ids
        if not (shown or refusal or choice.open_call):
            return None
        if self.first_token_at is None:
            self.first_token_at = clock.now()
        choice.content.append(content)
        choice.reasoning.append(reasoning)
        choice.refusal.append(refusal)
        choice.logprobs += logprobs
        self.tokens += len(logprobs) or 1
        if not shown:
            return None
        ended = choice.finish_reason if reason is not None else None
        return Delta(choice.index, content, reasoning, logprobs, ended, tuple(calls), ids, prompt)

    def _new_ids(self, choice: ChoiceState) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Token ids of a choice and of the prompt that no delta has, if they are asked for and the
        upstream says both."""
        if not (self._request.return_token_ids and self._prompt_ids):
            return (), ()
        begun, choice.streamed_ids = choice.streamed_ids, len(choice.token_ids)
        prompt = tuple(self._prompt_ids) if choice.index == 0 and begun == 0 else ()
        return tuple(choice.token_ids[begun:]), prompt

    def _fragments(
        self, choice: ChoiceState, fragments: Sequence[Mapping[str, Any]]
    ) -> list[ToolCallDelta]:
        """Append parts of tool calls; returns the calls that are complete: a later one begins."""
        complete: list[ToolCallDelta] = []
        for part in fragments:
            function = part.get("function") or {}
            given_id, number = _text(part.get("id")), part.get("index")
            call = choice.open_call
            follows = (
                call is not None
                and (number is None or number == choice.open_number)
                and (not given_id or given_id == call.id)
            )
            if not follows:
                complete += self._close(choice)
                call = choice.open_call = Call()
                choice.open_number = choice.open_number + 1 if number is None else number
            assert call is not None
            arguments = function.get("arguments")
            if isinstance(arguments, dict):
                arguments = to_json(arguments)
            call.id = call.id or given_id
            call.name += _text(function.get("name"))
            call.arguments.append(_text(arguments))
        return complete

    def _close(self, choice: ChoiceState) -> list[ToolCallDelta]:
        """End the open call."""
        call, choice.open_call = choice.open_call, None
        if call is None:
            return []
        function = FunctionCall(name=call.name, arguments="".join(call.arguments) or "{}")
        return [choice.add_call(function, call.id)]

    def _reason(self, reason: Any) -> FinishReason:
        if reason == "content_filter":
            raise invalid("the upstream's content filter stopped the answer", "messages")
        if reason == "abort":
            raise JobError("unavailable", "the upstream aborted the answer")
        known = REASONS.get(reason) if isinstance(reason, str) else None
        if known is None:
            raise broken(f"it has the unknown finish_reason {str(reason)[:MAX_TEXT]!r}")
        return known

    def _count(self, usage: Any) -> None:
        """Take the figures of the upstream; the last ones hold."""
        if not isinstance(usage, dict):
            return
        prompt, output = _count(usage, "prompt_tokens"), _count(usage, "completion_tokens")
        if prompt is None or output is None:
            return
        of_prompt = usage.get("prompt_tokens_details")
        of_output = usage.get("completion_tokens_details")
        cached, reasoned = _count(of_prompt, "cached_tokens"), _count(of_output, "reasoning_tokens")
        accepted = _count(of_output, "accepted_prediction_tokens")
        rejected = _count(of_output, "rejected_prediction_tokens")
        self._usage = Usage(
            prompt_tokens=prompt,
            completion_tokens=output,
            total_tokens=prompt + output,
            prompt_tokens_details=None
            if cached is None
            else Usage.PromptDetails(cached_tokens=cached),
            completion_tokens_details=None
            if reasoned is None
            else Usage.CompletionDetails(
                reasoning_tokens=reasoned,
                accepted_prediction_tokens=accepted or None,
                rejected_prediction_tokens=rejected or None,
            ),
        )

    @property
    def usage(self) -> Usage | None:
        """The figures of the upstream; None as long as it has said none."""
        return self._usage


def lost(answer: Answer, why: str) -> JobError:
    """The error of a request whose connection was lost after it was sent."""
    place = "in the middle of the answer" if answer.begun else "before the answer began"
    return JobError("unavailable", f"the connection to the upstream was lost {place}: {why}")


def _text(value: Any) -> str:
    """Raises TypeError for a value that is no text."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} instead of a text")
    return encodable(value)


def _ids(value: Any) -> list[int]:
    """Token ids of vLLM's return_token_ids. Raises TypeError for others."""
    ids = value or []
    if not (isinstance(ids, list) and all(type(one) is int for one in ids)):
        raise TypeError("token ids that are no list of integers")
    return ids


def _count(figures: Any, name: str) -> int | None:
    value = figures.get(name) if isinstance(figures, dict) else None
    return value if isinstance(value, int) and value >= 0 else None


def _logprobs(value: Any) -> list[TokenLogprob]:
    content = value.get("content") if isinstance(value, dict) else None
    return [
        TokenLogprob(
            **_top(token).to_dict(),
            top_logprobs=[_top(one) for one in token.get("top_logprobs") or ()],
        )
        for token in content or ()
    ]


def _top(token: Mapping[str, Any]) -> TopLogprob:
    raw = token.get("bytes")
    return TopLogprob(token=_text(token["token"]), logprob=float(token["logprob"]), bytes=raw)


def _shown(data: bytes) -> str:
    text = data.decode("utf-8", "replace")
    return repr(text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}…")
