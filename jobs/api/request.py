"""A chat-completion request: OpenAI's fields, vLLM's extensions, and `job` for the queue."""

from __future__ import annotations

import warnings
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, StrictBool, StrictInt, model_validator

from jobs.api.sampling import Sampling
from jobs.api.wire import Number, Text, Wire
from jobs.keys import JOB_ID, RUN_ID

# Limits of free JSON; serializers and parsers have limits of their own beyond these.
MAX_DEPTH = 64  # levels of nested lists and objects in one field
MAX_BITS = 1024  # of an integer


class TextPart(Wire):
    """One part of a multi-part content. Text only: images and audio are not supported."""

    type: Literal["text"]
    text: Text


class FunctionCall(Wire):
    name: Text
    arguments: Text  # JSON text


class ToolCall(Wire):
    id: Text
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Wire):
    """One message. Only an assistant message with tool calls may omit `content`."""

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
        """The content as one string; parts are joined without a separator."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class StreamOptions(Wire):
    include_usage: StrictBool = False


class ResponseFormat(Wire):
    """OpenAI's response_format. The worker refuses all types but `text`."""

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
    """How the request is queued, and what is recorded with its result. All optional."""

    id: Annotated[Text, Field(pattern=f"^{JOB_ID.pattern}$")] | None = None
    run: Annotated[Text, Field(pattern=f"^{RUN_ID.pattern}$")] | None = None
    row: Annotated[StrictInt, Field(ge=0)] | None = None  # row_index in the run
    custom_id: Text | None = None  # the user's own key, copied to the result row
    target: Text | None = None  # the expected answer, copied to the result row
    session: Text | None = None
    priority: Literal["interactive", "bulk"] = "interactive"
    ttl: Annotated[Number, Field(gt=0)] | None = None  # seconds from enqueueing to the end
    retries: Annotated[StrictInt, Field(ge=0, le=100)] = 0  # for retryable errors
    tags: list[Text] | None = None


# Fields of OpenAI's API that have no effect with a local text model.
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
    """A field of OpenAI's API was given that has no effect."""


class ChatRequest(Sampling):
    """One chat completion to run: OpenAI's fields, vLLM's extensions, and the queue's under `job`.

    Raises InvalidRequest, naming the field, if a value is invalid.
    """

    model: Annotated[Text, Field(min_length=1)]
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Text | dict[str, Any] | None = None
    stream: StrictBool | None = None  # None: interactive jobs stream, bulk jobs don't
    stream_options: StreamOptions | None = None
    user: Text | None = None
    metadata: dict[Text, Text] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    job: JobOptions = Field(default_factory=JobOptions)

    @model_validator(mode="before")
    @classmethod
    def _check_limits(cls, data: Any) -> Any:
        for name, value in data.items() if isinstance(data, dict) else ():
            _check_json(value, MAX_DEPTH, str(name))
        return data

    @model_validator(mode="before")
    @classmethod
    def _drop_ignored(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        ignored = sorted(IGNORED_FIELDS & data.keys())
        if ignored:
            warnings.warn(
                f"fields without effect are ignored: {', '.join(ignored)}",
                IgnoredFieldWarning,
                stacklevel=5,
            )
            data = {key: value for key, value in data.items() if key not in ignored}
        return data

    @model_validator(mode="after")
    def _merge_token_limits(self) -> Self:
        if self.max_completion_tokens is not None:
            if self.max_tokens is not None and self.max_tokens != self.max_completion_tokens:
                raise ValueError(
                    "max_tokens and max_completion_tokens differ: set only one "
                    f"(got {self.max_tokens} and {self.max_completion_tokens})"
                )
            self.max_tokens, self.max_completion_tokens = self.max_completion_tokens, None
        return self

    @property
    def publishes(self) -> bool:
        """Whether the job's tokens are published to Redis as they are generated."""
        return self.job.priority == "interactive" if self.stream is None else self.stream

    def sampling(self) -> Sampling:
        """The sampling fields alone."""
        return Sampling(**{name: getattr(self, name) for name in Sampling.model_fields})


def _check_json(value: Any, depth: int, field: str) -> None:
    """Raises ValueError for more than `depth` levels of nesting, or a huge integer."""
    if isinstance(value, dict | list | tuple):
        if not depth:
            raise ValueError(f"{field} is nested deeper than {MAX_DEPTH} levels")
        for item in value.values() if isinstance(value, dict) else value:
            _check_json(item, depth - 1, field)
    elif isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ValueError(f"{field} contains an integer of more than {MAX_BITS} bits")
