"""The input of a response: items, and the messages of a chat that they are.

Reasoning and the calls of functions are items of their own. In a chat they are parts of one message
of the assistant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from jobs.api.wire import describe
from jobs.errors import InvalidRequest, invalid

ROLES = ("user", "assistant", "system", "developer")
TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
MAX_ID = 200  # characters of an id that is kept


class Conversation:
    """The items of an input, with ids, and their messages. `job_id`: begins the ids of items that
    have none."""

    def __init__(self, job_id: str) -> None:
        self.items: list[dict[str, Any]] = []
        self.messages: list[dict[str, Any]] = []
        self._job_id = job_id
        self._ids: set[str] = set()
        self._reasoning = ""  # which the next message of the assistant begins with
        self._turn: dict[str, Any] | None = None  # the last message, which further calls belong to

    @classmethod
    def read(cls, value: Any, job_id: str) -> Conversation:
        """Raises InvalidRequest."""
        self = cls(job_id)
        if isinstance(value, str):
            value = [{"role": "user", "content": value}]
        if not isinstance(value, list) or not value:
            given = "nothing" if value in (None, []) else describe(value)
            raise invalid(f"input: expected a text or a list of items, got {given}", "input")
        for number, item in enumerate(value):
            self._add(item, f"input[{number}]")
        return self

    def _add(self, item: Any, path: str) -> None:
        if not isinstance(item, dict):
            raise invalid(f"{path}: expected an object, got {describe(item)}", path)
        kind = item.get("type") or ("message" if "role" in item else None)
        add = self._adders.get(kind) if isinstance(kind, str) else None
        if add is None:
            raise invalid(
                f"{path}: the item type {describe(kind)} is not supported: remove the item; "
                f"supported: {', '.join(self._adders)}",
                f"{path}.type",
            )
        add(self, item, path)

    def _message(self, item: Mapping[str, Any], path: str) -> None:
        role = item.get("role")
        if role not in ROLES:
            raise invalid(
                f"{path}.role: must be one of {', '.join(ROLES)}, got {describe(role)}",
                f"{path}.role",
            )
        texts = _texts(item.get("content"), f"{path}.content")
        message: dict[str, Any] = {"role": role, "content": _content(texts)}
        if role == "assistant":
            self._begin_turn(message)
            parts = [{"type": "output_text", "text": text, "annotations": []} for text in texts]
        else:
            self._turn, self._reasoning = None, ""
            self.messages.append(message)
            parts = [{"type": "input_text", "text": text} for text in texts]
        self._keep(item, "msg", type="message", role=role, status="completed", content=parts)

    def _call(self, item: Mapping[str, Any], path: str) -> None:
        name, arguments, call_id = (
            _text(item, field, path) for field in ("name", "arguments", "call_id")
        )
        if self._turn is None or self._reasoning:
            self._begin_turn({"role": "assistant", "content": None})
        assert self._turn is not None
        function = {"name": name, "arguments": arguments}
        self._turn.setdefault("tool_calls", []).append(
            {"id": call_id, "type": "function", "function": function}
        )
        self._keep(
            item,
            "fc",
            type="function_call",
            call_id=call_id,
            name=name,
            arguments=arguments,
            status="completed",
        )

    def _output(self, item: Mapping[str, Any], path: str) -> None:
        call_id = _text(item, "call_id", path)
        output = item.get("output")
        texts = _texts(output, f"{path}.output")
        self._turn, self._reasoning = None, ""
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": _content(texts)})
        parts = [{"type": "input_text", "text": text} for text in texts]
        self._keep(
            item,
            "fco",
            type="function_call_output",
            call_id=call_id,
            output=output if isinstance(output, str) else parts,
            status="completed",
        )

    def _thought(self, item: Mapping[str, Any], path: str) -> None:
        """Reasoning: its text, or the summary of it if it has none."""
        summary, content = (
            _texts(item.get(field) or [], f"{path}.{field}") for field in ("summary", "content")
        )
        self._reasoning += "\n".join(content or summary)
        self._keep(
            item,
            "rs",
            type="reasoning",
            summary=[{"type": "summary_text", "text": text} for text in summary],
            content=[{"type": "reasoning_text", "text": text} for text in content],
            status="completed",
        )

    _adders: ClassVar[dict[str, Callable[[Conversation, Mapping[str, Any], str], None]]] = {
        "message": _message,
        "function_call": _call,
        "function_call_output": _output,
        "reasoning": _thought,
    }

    def _begin_turn(self, message: dict[str, Any]) -> None:
        if self._reasoning:
            message["reasoning_content"] = self._reasoning
        self._turn, self._reasoning = message, ""
        self.messages.append(message)

    def _keep(self, item: Mapping[str, Any], prefix: str, **fields: Any) -> None:
        """Note an item under its own id, if it has one that no other item has."""
        given = item.get("id")
        if not (isinstance(given, str) and 0 < len(given) <= MAX_ID) or given in self._ids:
            given = f"{prefix}_{self._job_id}_in{len(self.items)}"
        self._ids.add(given)
        self.items.append({"id": given, **fields})


def _text(item: Mapping[str, Any], field: str, path: str) -> str:
    value = item.get(field)
    if not isinstance(value, str):
        raise invalid(
            f"{path}.{field}: expected a string, got {describe(value)}", f"{path}.{field}"
        )
    return value


def _texts(content: Any, path: str) -> list[str]:
    """The texts of a content. Raises InvalidRequest for parts that are no text."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise invalid(f"{path}: expected a text or a list of parts, got {describe(content)}", path)
    texts = []
    for number, part in enumerate(content):
        place = f"{path}[{number}]"
        if not isinstance(part, dict):
            raise invalid(f"{place}: expected an object, got {describe(part)}", place)
        kind = part.get("type")
        if kind == "refusal":
            texts.append(_text(part, "refusal", place))
        elif kind in TEXT_PARTS:
            texts.append(_text(part, "text", place))
        else:
            raise _no_text(kind, place)
    return texts


def _no_text(kind: Any, place: str) -> InvalidRequest:
    return invalid(
        f"{place}: a part of the type {describe(kind)} is not supported: models here read text "
        "(input_text) alone",
        f"{place}.type",
    )


def _content(texts: list[str]) -> str | list[dict[str, Any]]:
    """Texts as the content of a message."""
    if len(texts) == 1:
        return texts[0]
    return [{"type": "text", "text": text} for text in texts]
