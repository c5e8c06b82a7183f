"""The completion of a request from the parts of its choices, whatever generates them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from jobs.api.answer import (
    AssistantMessage,
    ChatCompletion,
    Choice,
    ChoiceLogprobs,
    FinishReason,
    PromptLogprob,
    TokenLogprob,
    Usage,
    completion_id,
)
from jobs.api.chunk import ToolCallDelta
from jobs.api.message import FunctionCall, ToolCall
from jobs.api.request import ChatRequest


@dataclass
class ChoiceParts:
    """The output of one choice so far. `job`: its name, for the ids of calls."""

    index: int
    job: str
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    refusal: list[str] = field(default_factory=list)
    tool_calls: list[ToolCallDelta] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def add_call(self, function: FunctionCall, id: str = "") -> ToolCallDelta:
        """Append a call. Without an id it gets one that it has in each attempt of its job: streams
        that go on with another attempt compare it."""
        number = len(self.tool_calls)
        digest = blake2b(f"{self.job}:{self.index}:{number}".encode(), digest_size=12)
        id = id or f"call_{digest.hexdigest()}"
        self.tool_calls.append(ToolCallDelta(id=id, function=function, index=number))
        return self.tool_calls[-1]

    def finish(self, reason: FinishReason | None) -> None:
        """Set the finish reason: that of an answer with calls that ended by itself is its calls."""
        self.finish_reason = "tool_calls" if self.tool_calls and reason == "stop" else reason

    def message(self) -> AssistantMessage:
        content = "".join(self.content)
        refusal = "".join(self.refusal) or None
        empty = not content and (self.tool_calls or refusal)
        return AssistantMessage(
            content=None if empty else content,
            reasoning_content="".join(self.reasoning) or None,
            refusal=refusal,
            tool_calls=[ToolCall(id=c.id, function=c.function) for c in self.tool_calls] or None,
        )


def completion_of(
    request: ChatRequest,
    created: int,
    choices: Sequence[ChoiceParts],
    *,
    usage: Usage | None,
    fingerprint: str | None,
    prompt_token_ids: list[int],
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None,
) -> ChatCompletion:
    """The completion at this moment. `created`: seconds since the epoch. Token ids are empty where
    nobody has said them."""
    ids = request.return_token_ids
    return ChatCompletion(
        id=completion_id(request.job.id),
        created=created,
        model=request.model,
        choices=[
            Choice(
                index=one.index,
                message=one.message(),
                finish_reason=one.finish_reason or "stop",
                logprobs=ChoiceLogprobs(content=one.logprobs) if request.logprobs else None,
                token_ids=one.token_ids if ids and prompt_token_ids else None,
            )
            for one in choices
        ],
        usage=usage,
        system_fingerprint=fingerprint,
        prompt_logprobs=prompt_logprobs,
        prompt_token_ids=prompt_token_ids or None if ids else None,
    )
