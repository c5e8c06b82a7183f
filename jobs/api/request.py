"""A chat-completion request: OpenAI's fields, vLLM's extensions, and `job` for the queue."""

from __future__ import annotations

import warnings
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, StrictBool, StrictInt, model_validator

from jobs.api.sampling import Sampling
from jobs.api.wire import MAX_DEPTH, Number, Text, Wire, check_json
from jobs.keys import JOB_ID, RUN_ID


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
