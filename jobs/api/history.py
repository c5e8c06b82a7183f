"""Messages as other APIs write them → messages of `jobs.api.message`.

OpenAI's API, vLLM and litellm return messages with fields of their own. Clients send them back as
history. Unknown fields that are null or empty are dropped, at every level. Values of the wrong type
are kept, so that validation names them. Raises InvalidRequest for what can't be taken.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from jobs.api.message import Message, SentFunctionCall, SentToolCall, TextPart
from jobs.api.unsupported_fields import (
    IGNORED_IN_CALL,
    IGNORED_IN_FUNCTION,
    IGNORED_IN_MESSAGE,
    IGNORED_IN_PART,
    drop_ignored,
    is_empty,
)
from jobs.api.wire import Wire
from jobs.errors import invalid

_PLAIN = {"role", "content"}


def plain_messages(messages: Any, ignored: list[str]) -> Any:
    """The messages in our form. Names of dropped fields are added to `ignored`."""
    if not isinstance(messages, list | tuple):
        return messages
    return [
        _message(message, f"messages[{number}]", ignored) for number, message in enumerate(messages)
    ]


def _message(message: Any, path: str, ignored: list[str]) -> Any:
    if type(message) is dict and message.keys() == _PLAIN and type(message["content"]) is str:
        return message  # nearly all messages of large batches
    message = _as_dict(message, Message)
    if not isinstance(message, dict):
        return message
    plain = drop_ignored(message, IGNORED_IN_MESSAGE, path, ignored)
    _merge_reasoning(plain, path)
    _drop_deprecated(plain, path)
    if isinstance(plain.get("content"), list | tuple):
        plain["content"] = [
            _part(part, f"{path}.content[{number}]", ignored)
            for number, part in enumerate(plain["content"])
        ]
    refusal = plain.pop("refusal", None)
    if not is_empty(refusal) and is_empty(plain.get("content")):
        plain["content"] = refusal  # what the assistant answered
    elif not is_empty(refusal):
        ignored.append(f"{path}.refusal")
    if isinstance(plain.get("tool_calls"), list | tuple):
        plain["tool_calls"] = [
            _call(call, f"{path}.tool_calls[{number}]", ignored)
            for number, call in enumerate(plain["tool_calls"])
        ]
    return _drop_empty(plain, Message)


def _as_dict(value: Any, ours: type[Wire]) -> Any:
    """Another package's object, such as openai's ChatCompletionMessage, as a dict."""
    if isinstance(value, BaseModel) and not isinstance(value, ours):
        return value.model_dump(warnings=False)
    return value


def _drop_empty(data: dict[str, Any], known: type[Wire]) -> dict[str, Any]:
    """`data` without the unknown fields that are empty."""
    return {
        name: value
        for name, value in data.items()
        if name in known.model_fields or not is_empty(value)
    }


def _merge_reasoning(message: dict[str, Any], path: str) -> None:
    """vLLM and OpenRouter call reasoning_content `reasoning`; some versions send both."""
    reasoning = message.pop("reasoning", None)
    if is_empty(reasoning):
        return
    if message.get("reasoning_content") not in (None, "", reasoning):
        fact = "reasoning and reasoning_content differ: set only one"
        raise invalid(f"{path}: {fact}", f"{path}.reasoning")
    message["reasoning_content"] = reasoning


def _drop_deprecated(message: dict[str, Any], path: str) -> None:
    """Drop the null fields of OpenAI's messages that can't be taken with a value."""
    for name, hint in (
        ("audio", "send its transcript as content"),
        ("function_call", "it is OpenAI's former name of tool_calls: use this"),
    ):
        if not is_empty(message.pop(name, None)):
            raise invalid(f"{path}.{name} is not supported: {hint}", f"{path}.{name}")


def _part(part: Any, path: str, ignored: list[str]) -> Any:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    part = _as_dict(part, TextPart)
    if not isinstance(part, dict):
        return part
    plain = drop_ignored(part, IGNORED_IN_PART, path, ignored)
    if plain.get("type") == "refusal" and "refusal" in plain:
        return {"type": "text", "text": plain["refusal"]}
    return _drop_empty(plain, TextPart)


def _call(call: Any, path: str, ignored: list[str]) -> Any:
    call = _as_dict(call, SentToolCall)
    if not isinstance(call, dict):
        return call
    plain = drop_ignored(call, IGNORED_IN_CALL, path, ignored)
    plain.pop("index", None)  # of a streamed delta: the place in the list says the same
    if plain.get("type", "") is None:
        del plain["type"]
    function = _as_dict(plain.get("function"), SentFunctionCall)
    if isinstance(function, dict):
        function = drop_ignored(function, IGNORED_IN_FUNCTION, f"{path}.function", ignored)
        plain["function"] = _drop_empty(function, SentFunctionCall)
    return _drop_empty(plain, SentToolCall)
