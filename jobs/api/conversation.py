"""A conversation: its turns, and the messages that they are together.

A turn is what one request adds: its new messages and the answer. Sessions keep turns as JSON in
Redis, `ChatSession` keeps them in memory and in files.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from jobs.api.answer import AssistantMessage, ChatCompletion, FinishReason
from jobs.api.message import FunctionCall, Message, ToolCall
from jobs.api.params import MessageInput
from jobs.api.request import ChatRequest
from jobs.api.wire import describe, no_lone_surrogates
from jobs.encoding import to_json
from jobs.errors import invalid

TurnInput: TypeAlias = str | MessageInput | Iterable[MessageInput]
TurnEnd: TypeAlias = FinishReason | Literal["cancelled"]

LEADING_ROLES = ("system", "developer")


@dataclass(frozen=True, slots=True)
class Turn:
    """New messages and their answer, as dicts in OpenAI's form. `finish_reason` is `cancelled` if
    the answer was stopped; `answer` is then what had been generated."""

    messages: list[dict[str, Any]]
    answer: dict[str, Any]
    finish_reason: TurnEnd
    job: str = ""

    def to_json(self) -> str:
        return to_json(
            {
                "job": self.job,
                "messages": self.messages,
                "answer": self.answer,
                "finish_reason": self.finish_reason,
            }
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> Turn:
        """Raises ValueError unless `text` is a turn."""
        data = json.loads(text)
        if not isinstance(data, dict):
            raise ValueError("a turn is a JSON object")
        messages, answer = data.get("messages"), data.get("answer")
        if not isinstance(messages, list) or not isinstance(answer, dict):
            raise ValueError("a turn has messages and an answer")
        end, job = data.get("finish_reason") or "stop", data.get("job", "")
        if not all(isinstance(one, dict) for one in messages):
            raise ValueError("a message is a JSON object")
        if not isinstance(end, str) or not isinstance(job, str):
            raise ValueError("finish_reason and job are strings")
        return cls(messages, _known(answer), end, job)  # type: ignore[arg-type]


def ended_turn(
    messages: Sequence[dict[str, Any]],
    completion: ChatCompletion,
    *,
    cancelled: bool,
    job: str = "",
) -> Turn | None:
    """The turn of a request that has ended. None if it was cancelled before it had generated
    anything: the conversation is then as before."""
    choice = completion.choices[0]
    message = choice.message
    if cancelled and not (message.content or message.reasoning_content or message.tool_calls):
        return None
    end: TurnEnd = "cancelled" if cancelled else choice.finish_reason
    return Turn(list(messages), _message_of(message), end, job)


def messages_of(system: str, turns: Iterable[Turn]) -> list[dict[str, Any]]:
    """All messages of a conversation. `system`: its system message; empty for none."""
    messages: list[dict[str, Any]] = []
    if system:
        messages.append({"role": "system", "content": system})
    for turn in turns:
        messages += [*turn.messages, turn.answer]
    return messages


def new_messages(content: TurnInput) -> list[Any]:
    """The messages of a turn: a text is one message of the user. Raises InvalidRequest."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    if isinstance(content, Mapping) or hasattr(content, "model_dump"):
        return [content]
    return _listed(content, "a text, a message or a list of messages")


def checked_messages(messages: Iterable[MessageInput]) -> list[dict[str, Any]]:
    """Messages of any API in our form. Raises InvalidRequest."""
    request = ChatRequest(model="any", messages=messages)
    dumped: list[dict[str, Any]] = request.to_dict()["messages"]
    return dumped


def check_turns(turns: Iterable[Turn]) -> None:
    """Raises InvalidRequest for turns that could not be read again, or that no request may have."""
    messages: list[Any] = []
    for number, turn in enumerate(turns):
        _check_turn(turn, f"turns[{number}]")
        messages += [*turn.messages, turn.answer]
    if messages:
        checked_messages(messages)


def checked_system(system: Any) -> str:
    """The system text of a conversation. Raises InvalidRequest."""
    return _checked_text(system, "system", "system")


def split_turns(messages: Iterable[MessageInput | Turn]) -> tuple[str, list[Turn]]:
    """The system text and the turns of a list of messages, or of turns. Raises InvalidRequest for
    messages that no conversation has, and for a last message without an answer."""
    given: list[Any] = _listed(messages, "a list of messages, or of turns,")
    turns = [one for one in given if isinstance(one, Turn)]
    if turns and len(turns) == len(given):
        check_turns(turns)
        return "", turns
    if turns:
        raise invalid("a history is a list of messages, or of turns: got both", "messages")
    plain = checked_messages(one for one in given if not isinstance(one, Turn)) if given else []
    system = ""
    if plain and plain[0]["role"] in LEADING_ROLES:
        system = ChatRequest(model="any", messages=[plain[0]]).messages[0].text
        plain = plain[1:]
    waiting: list[dict[str, Any]] = []
    for number, message in enumerate(plain):
        if message["role"] != "assistant":
            waiting.append(message)
            continue
        if not waiting:
            raise invalid(
                f"messages[{number}]: an answer of the assistant needs a message before it",
                "messages",
            )
        reason: TurnEnd = "tool_calls" if message.get("tool_calls") else "stop"
        turns.append(Turn(waiting, message, reason))
        waiting = []
    if waiting:
        raise invalid(
            "messages: the last one has no answer: a history ends with a message of the assistant",
            "messages",
        )
    return system, turns


def _known(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer that was stored, without the fields of later versions: requests refuse them."""
    kept: dict[str, Any] = _fields(answer, {*Message.model_fields, *AssistantMessage.model_fields})
    if isinstance(calls := kept.get("tool_calls"), list):
        kept["tool_calls"] = [_fields(call, ToolCall.model_fields) for call in calls]
        for call in kept["tool_calls"]:
            if isinstance(call, dict) and "function" in call:
                call["function"] = _fields(call["function"], FunctionCall.model_fields)
    return kept


def _fields(value: Any, known: Container[str]) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: one for name, one in value.items() if name in known}


def _check_turn(turn: Turn, where: str) -> None:
    given: Any = turn.messages
    if not isinstance(given, list | tuple) or not given:
        raise invalid(f"{where}: its messages are a list with at least one", "messages")
    if not isinstance(turn.answer, dict) or turn.answer.get("role") != "assistant":
        raise invalid(f"{where}: its answer is a message of the assistant", "messages")
    for name, text in (("finish_reason", turn.finish_reason), ("job", turn.job)):
        _checked_text(text, f"{where}.{name}", "messages")


def _checked_text(text: Any, name: str, param: str) -> str:
    if not isinstance(text, str):
        raise invalid(f"{name}: a text is needed here; got {describe(text)}", param)
    try:
        return no_lone_surrogates(text)
    except ValueError as error:
        raise invalid(f"{name}: {error}", param) from None


def _listed(given: Any, needed: str) -> list[Any]:
    if isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping):
        return list(given)
    raise invalid(f"{needed} is needed here; got {describe(given)}", "messages")


def _message_of(message: AssistantMessage) -> dict[str, Any]:
    plain = message.to_dict()
    plain.setdefault("content", None)
    if plain["content"] is None and not message.tool_calls:
        plain["content"] = ""
    return plain
