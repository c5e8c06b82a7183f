"""One message of a conversation, and its parts: text, tool calls."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, model_validator

from jobs.api.wire import Output, Text, Wire

# Roles whose messages may have no content: a model may call tools or refuse instead, and a tool
# may return nothing.
MAY_BE_EMPTY = frozenset({"assistant", "tool", "function", "ipython"})


class TextPart(Wire):
    """One part of a multi-part content. Text only: images and audio are not supported."""

    type: Literal["text"]
    text: Text


def _as_json_text(arguments: Any) -> Any:
    """Arguments may be an object, as templates show them, or null."""
    if arguments is None:
        return "{}"
    if not isinstance(arguments, dict):
        return arguments
    try:
        return json.dumps(arguments, ensure_ascii=False)
    except TypeError as error:
        raise ValueError(f"the object can't be written as JSON: {error}") from None


class FunctionCall(Output):
    """The function of a `ToolCall`."""

    name: Text
    arguments: Annotated[Text, BeforeValidator(_as_json_text)]  # JSON text


class ToolCall(Output):
    """A call in an answer."""

    id: Text
    type: Literal["function"] = "function"
    function: FunctionCall


class SentFunctionCall(FunctionCall):
    """The function of a `SentToolCall`."""

    model_config = ConfigDict(extra="forbid")


class SentToolCall(ToolCall):
    """A call in a message of a request: unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")
    function: SentFunctionCall


class Message(Wire):
    """One message. Only messages of the assistant and of tools may omit `content`.

    `function` and `ipython` are other names of the role `tool`.
    """

    role: Literal["system", "developer", "user", "assistant", "tool", "function", "ipython"]
    content: Text | list[TextPart] | None = None
    reasoning_content: Text | None = None
    name: Text | None = None
    tool_call_id: Text | None = None
    tool_calls: list[SentToolCall] | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.content is None and self.role not in MAY_BE_EMPTY:
            raise ValueError(f"a {self.role} message needs content")
        return self

    @property
    def text(self) -> str:
        """The content as one string; parts are joined without a separator."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""
