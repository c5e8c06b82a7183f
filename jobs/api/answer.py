"""The answer to a request: `ChatCompletion` and its parts, in OpenAI's JSON form."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field

from jobs.api.message import ToolCall
from jobs.api.wire import Output

FinishReason = Literal["stop", "length", "tool_calls"]

LEAST_BYTES_OF_LOGPROB = len('{"token":"","logprob":0}')


class TopLogprob(Output):
    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob] = Field(default_factory=list)


class ChoiceLogprobs(Output):
    content: list[TokenLogprob] | None = None
    refusal: list[TokenLogprob] | None = None


class PromptLogprob(Output):
    """One token at a position of the prompt, in vLLM's form. `rank`: 1 for the most probable."""

    logprob: float
    rank: int
    decoded_token: str


class Usage(Output):
    class PromptDetails(Output):
        cached_tokens: int = 0

    class CompletionDetails(Output):
        """The figures of predictions are None if the model ran without a draft."""

        reasoning_tokens: int = 0
        accepted_prediction_tokens: int | None = None
        rejected_prediction_tokens: int | None = None
        prediction_steps: int | None = None  # in which predicted tokens were verified

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: CompletionDetails | None = None
    peak_memory_mb: int | None = None  # that the device had in use while the job ran

    @classmethod
    def in_mb(cls, nbytes: int) -> int | None:
        """A `peak_memory_mb`, rounded up; None for 0, if nothing ran."""
        return -(-nbytes // 10**6) or None


class AssistantMessage(Output):
    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None


class Choice(Output):
    index: int
    message: AssistantMessage
    finish_reason: FinishReason
    logprobs: ChoiceLogprobs | None = None
    token_ids: list[int] | None = None  # as vLLM has them, if the request asks for them


def completion_id(job_id: str | None) -> str:
    """Id of the answer and of its chunks. None: a request that is not a job."""
    return f"chatcmpl-{job_id or 'local'}"


class ChatCompletion(Output):
    """The complete answer to a request. Validates as openai.types.chat.ChatCompletion."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int  # seconds since the epoch
    model: str
    choices: list[Choice]
    usage: Usage | None = None
    system_fingerprint: str | None = None
    # One entry per token of the prompt, by token id: the token itself and the most probable ones.
    # The first is null. None unless the request has prompt_logprobs.
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None
    prompt_token_ids: list[int] | None = None  # as vLLM has them, if the request asks for them

    def to_dict(self) -> dict[str, Any]:
        data = super().to_dict()
        for dumped, choice in zip(data["choices"], self.choices, strict=True):
            # OpenAI requires the key, even if it is null.
            dumped["message"].setdefault("content", choice.message.content)
        return data

    @property
    def text(self) -> str:
        """Content of the first choice."""
        return self.choices[0].message.content or ""

    @property
    def finish_reason(self) -> FinishReason:
        """That of the first choice."""
        return self.choices[0].finish_reason

    def least_detail_bytes(self) -> int:
        """Bytes that its log-probabilities have as JSON, at least. Does not encode them, since they
        may be larger than the memory."""
        tokens = [
            token
            for choice in self.choices
            if choice.logprobs is not None
            for token in choice.logprobs.content or ()
        ]
        return LEAST_BYTES_OF_LOGPROB * sum(1 + len(token.top_logprobs) for token in tokens)

    def without_details(self) -> Self:
        """The answer without its log-probabilities."""
        choices = [choice.model_copy(update={"logprobs": None}) for choice in self.choices]
        return self.model_copy(update={"choices": choices})
