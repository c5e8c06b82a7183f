"""Messages as other APIs write them → messages of `jobs.api.message`.

OpenAI's API, vLLM and litellm return messages with fields of their own. Clients send them back as
history. Values of the wrong type are kept, so that validation names them. Raises InvalidRequest for
what can't be taken.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from jobs.api.fields import (
    IGNORED_IN_CALL,
    IGNORED_IN_MESSAGE,
    IGNORED_IN_PART,
    drop_ignored,
    is_empty,
)
from jobs.api.message import Message
from jobs.errors import invalid


def plain_messages(messages: Any, ignored: list[str]) -> Any:
    """The messages in our form. Names of dropped fields are added to `ignored`."""
    if not isinstance(messages, list | tuple):
        return messages
    return [
        _message(message, f"messages[{number}]", ignored) for number, message in enumerate(messages)
    ]


def _message(message: Any, path: str, ignored: list[str]) -> Any:
    if isinstance(message, BaseModel) and not isinstance(message, Message):
        message = message.model_dump()  # such as openai's ChatCompletionMessage, or our own answer
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
    return plain


def _merge_reasoning(message: dict[str, Any], path: str) -> None:
    """vLLM and OpenRouter call reasoning_content `reasoning`; some versions send both."""
    reasoning = message.pop("reasoning", None)
    if is_empty(reasoning):
        return
    if message.get("reasoning_content") not in (None, reasoning):
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
    if not isinstance(part, dict):
        return part
    plain = drop_ignored(part, IGNORED_IN_PART, path, ignored)
    if plain.get("type") == "refusal" and "refusal" in plain:
        return {"type": "text", "text": plain["refusal"]}
    return plain


def _call(call: Any, path: str, ignored: list[str]) -> Any:
    if not isinstance(call, dict):
        return call
    plain = drop_ignored(call, IGNORED_IN_CALL, path, ignored)
    plain.pop("index", None)  # of a streamed delta: the place in the list says the same
    return plain
