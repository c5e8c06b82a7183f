"""One chunk of a streamed answer, in OpenAI's JSON form."""

from __future__ import annotations

from typing import Any, Literal

from jobs.api.answer import ChoiceLogprobs, FinishReason, Usage
from jobs.api.message import ToolCall
from jobs.api.wire import Output


class ToolCallDelta(ToolCall):
    """One tool call of a streamed answer. A call is streamed as a whole, when it is complete."""

    index: int  # among the calls of the answer


class ChoiceDelta(Output):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChunkChoice(Output):
    index: int
    delta: ChoiceDelta
    finish_reason: FinishReason | None = None
    logprobs: ChoiceLogprobs | None = None
    token_ids: list[int] | None = None  # as vLLM has them, if the request asks for them


class ChatChunk(Output):
    """One chunk of a streamed answer. Validates as openai.types.chat.ChatCompletionChunk.

    `cursor` is the chunk's position in the job's stream ("<attempt>-<seq>"), from which a stream
    can be resumed. `reset` means that the job runs again: discard all previous chunks.
    """

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    system_fingerprint: str | None = None
    cursor: str | None = None
    reset: bool | None = None
    prompt_token_ids: list[int] | None = None  # in the first chunk of choice 0, as token_ids

    def to_dict(self) -> dict[str, Any]:
        data = super().to_dict()
        for choice in data["choices"]:
            choice.setdefault("finish_reason", None)
        return data

    @property
    def text(self) -> str:
        """Content of the first choice in this chunk; empty if it has none."""
        return (self.choices[0].delta.content or "") if self.choices else ""
