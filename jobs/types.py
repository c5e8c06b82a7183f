"""The nouns of the wire: requests, chunks and completions in OpenAI's JSON form.

Owned here, used by everybody: producers build `ChatRequest`, the worker validates it again, streams
carry `ChatChunk`, results are `ChatCompletion`; whatever fails is a `JobError` (errors.py).
Field names and shapes follow OpenAI's chat-completions reference; extensions carry vLLM's names.
"""

from __future__ import annotations

import re
import warnings
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, StrictBool, StrictInt, model_validator

from jobs.errors import JobError as JobError  # one of the wire's nouns, too
from jobs.wire import MAX_DEPTH, Checked, Number, Text, Wire, check_json, kind_of

FinishReason = Literal["stop", "length", "tool_calls"]

JOB_ID = re.compile(r"[A-Za-z0-9_-]{1,200}")
RUN_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}")


# --- messages -----------------------------------------------------------------------------------


class TextPart(Wire):
    """One piece of a multi-part content. Only text: the models here read nothing else."""

    type: Literal["text"]
    text: Text


class FunctionCall(Wire):
    name: Text
    arguments: Text  # a JSON object, as text


class ToolCall(Wire):
    id: Text
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Wire):
    """One turn. `content` may be absent only where an assistant turn carries tool calls."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[TextPart] | None = None
    reasoning_content: Text | None = None
    name: Text | None = None
    tool_call_id: Text | None = None
    tool_calls: list[ToolCall] | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError(f"a {self.role} message needs content")
        return self

    @property
    def text(self) -> str:
        """The content as one string; parts are joined as they are."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


# --- requests -----------------------------------------------------------------------------------


class Sampling(Checked):
    """How tokens are chosen and when a completion ends.

    None means: the model's generation_config.json decides, then OpenAI's default. Penalties look at
    the last 64 tokens for `repetition_penalty` (prompt included) and at the whole completion for
    presence and frequency.
    """

    temperature: Annotated[Number, Field(ge=0, le=100)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[StrictInt, Field(ge=-1)] | None = None  # 0 and -1: off
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0, le=100)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[Number, Field(ge=-100, le=100)]] | None = None  # id as text
    seed: Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Text | list[Text] | None = None
    stop_token_ids: list[Annotated[StrictInt, Field(ge=0)]] | None = None
    max_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    min_tokens: Annotated[StrictInt, Field(ge=0)] | None = None
    ignore_eos: StrictBool | None = None
    n: Annotated[StrictInt, Field(ge=1, le=128)] | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _bias_keys(cls, data: Any) -> Any:
        """Python users may give token ids as ints; JSON has only strings."""
        if isinstance(data, dict) and isinstance(data.get("logit_bias"), dict):
            bias = {str(key): value for key, value in data["logit_bias"].items()}
            return {**data, "logit_bias": bias}
        return data

    @model_validator(mode="after")
    def _sound(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if "" in self.stop_strings:
            raise ValueError("stop: a stop string can't be empty")
        for key in self.logit_bias or {}:
            if not (key.isascii() and key.isdigit() and len(key) <= 10):
                raise ValueError(f"logit_bias: keys are token ids, got {kind_of(key)}")
        if self.min_tokens and self.max_tokens and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens {self.min_tokens} is greater than max_tokens {self.max_tokens}"
            )
        return self

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop


class StreamOptions(Wire):
    include_usage: StrictBool = False


class ResponseFormat(Wire):
    """OpenAI's response_format. Only `text` is served today; the rest is refused by the worker."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class FunctionDefinition(Wire):
    model_config = ConfigDict(extra="allow")
    name: Text
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class Tool(Wire):
    type: Literal["function"]
    function: FunctionDefinition


class JobOptions(Wire):
    """What the queue does with the request. All optional."""

    id: Annotated[Text, Field(pattern=f"^{JOB_ID.pattern}$")] | None = None
    run: Annotated[Text, Field(pattern=f"^{RUN_ID.pattern}$")] | None = None
    row: Annotated[StrictInt, Field(ge=0)] | None = None  # row_index of the run's data set
    custom_id: Text | None = None  # the user's own key, kept beside
    target: Text | None = None  # the expected answer, kept beside for scoring
    session: Text | None = None
    priority: Literal["interactive", "bulk"] = "interactive"
    ttl: Annotated[Number, Field(gt=0)] | None = None  # seconds it may wait and run
    retries: Annotated[StrictInt, Field(ge=0, le=100)] = 0  # for retryable errors
    tags: list[Text] | None = None


# Fields of OpenAI's API that mean nothing to a text model on your own machine.
IGNORED_FIELDS = frozenset(
    (
        "audio",
        "modalities",
        "moderation",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "reasoning_effort",
        "safety_identifier",
        "service_tier",
        "store",
        "verbosity",
        "web_search_options",
    )
)


class IgnoredFieldWarning(UserWarning):
    """A known OpenAI field was given that has no effect here."""


class ChatRequest(Sampling):
    """One chat completion to run: OpenAI's fields, vLLM's extensions, and our own under `job`.

    Raises InvalidRequest, naming the field, for anything that can't be meant.
    """

    model: Annotated[Text, Field(min_length=1)]
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Text | dict[str, Any] | None = None
    stream: StrictBool | None = None  # None: interactive jobs publish, bulk jobs don't
    stream_options: StreamOptions | None = None
    user: Text | None = None
    metadata: dict[Text, Text] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    job: JobOptions = Field(default_factory=JobOptions)

    @model_validator(mode="before")
    @classmethod
    def _serializable(cls, data: Any) -> Any:
        """What is free JSON goes through serializers that give up at some depth and size."""
        for name, value in data.items() if isinstance(data, dict) else ():
            check_json(value, MAX_DEPTH, str(name))
        return data

    @model_validator(mode="before")
    @classmethod
    def _drop_ignored(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        ignored = sorted(IGNORED_FIELDS & data.keys())
        if ignored:
            warnings.warn(
                f"no effect here, ignored: {', '.join(ignored)}", IgnoredFieldWarning, stacklevel=5
            )
            data = {key: value for key, value in data.items() if key not in ignored}
        return data

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        if self.max_completion_tokens is not None:
            if self.max_tokens is not None and self.max_tokens != self.max_completion_tokens:
                raise ValueError(
                    "max_tokens and max_completion_tokens differ: give one "
                    f"(got {self.max_tokens} and {self.max_completion_tokens})"
                )
            self.max_tokens, self.max_completion_tokens = self.max_completion_tokens, None
        return self

    @property
    def publishes(self) -> bool:
        """Whether the token stream goes out over Redis."""
        return self.job.priority == "interactive" if self.stream is None else self.stream

    def sampling(self) -> Sampling:
        """The sampling fields alone."""
        return Sampling(**{name: getattr(self, name) for name in Sampling.model_fields})


# --- answers ------------------------------------------------------------------------------------


class TopLogprob(Wire):
    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob] = Field(default_factory=list)


class ChoiceLogprobs(Wire):
    content: list[TokenLogprob] | None = None
    refusal: list[TokenLogprob] | None = None


class Usage(Wire):
    class PromptDetails(Wire):
        cached_tokens: int = 0

    class CompletionDetails(Wire):
        reasoning_tokens: int = 0

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: CompletionDetails | None = None


class AssistantMessage(Wire):
    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None


class Choice(Wire):
    index: int
    message: AssistantMessage
    finish_reason: FinishReason
    logprobs: ChoiceLogprobs | None = None


class ChatCompletion(Wire):
    """The whole answer. Validates as openai.types.chat.ChatCompletion."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int  # seconds since the epoch
    model: str
    choices: list[Choice]
    usage: Usage | None = None
    system_fingerprint: str | None = None

    def to_dict(self) -> dict[str, Any]:
        data = super().to_dict()
        for choice, mine in zip(data["choices"], self.choices, strict=True):
            choice["message"].setdefault("content", mine.message.content)
        return data

    @property
    def text(self) -> str:
        """Content of the first choice."""
        return self.choices[0].message.content or ""


class Delta(Wire):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChunkChoice(Wire):
    index: int
    delta: Delta
    finish_reason: FinishReason | None = None
    logprobs: ChoiceLogprobs | None = None


class ChatChunk(Wire):
    """A piece of a streamed answer. Validates as openai.types.chat.ChatCompletionChunk.

    `cursor` is the place in the job's stream ("<attempt>-<seq>"), to resume after it. A chunk with
    `reset` says that the job starts again: what was received so far is void.
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

    def to_dict(self) -> dict[str, Any]:
        data = super().to_dict()
        for choice in data["choices"]:
            choice.setdefault("finish_reason", None)
        return data

    @property
    def text(self) -> str:
        """Content delta of the first choice in this chunk."""
        return (self.choices[0].delta.content or "") if self.choices else ""
