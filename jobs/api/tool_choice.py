"""`tool_choice`: the functions that an answer must call, with the grammar of their arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jobs.api import grammar
from jobs.api.grammar import Grammar
from jobs.api.wire import describe
from jobs.errors import invalid

_FREE = ("auto", "none")
_WORDS = (*_FREE, "required")


class Function(Protocol):
    """A function that a request defines; `parameters`: a JSON schema."""

    name: str
    parameters: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Forced:
    """One function that may be called, its parameters as a JSON schema of an object, and the field
    of the request that has them."""

    name: str
    parameters: dict[str, Any]
    field: str

    @property
    def arguments(self) -> Grammar:
        return grammar.of_schema(self.parameters, self.field)


def forced_tools(
    choice: str | dict[str, Any] | None, tools: Sequence[Function]
) -> tuple[Forced, ...] | None:
    """The functions of which one must be called; None: none need be."""
    if choice is None or choice in _FREE:
        return None
    wanted = choice["function"]["name"] if isinstance(choice, dict) else None
    return tuple(
        Forced(
            tool.name,
            _of_object(tool.parameters or {}),
            f"tools[{number}].function.parameters",
        )
        for number, tool in enumerate(tools)
        if wanted in (None, tool.name)
    )


def check_tool_choice(choice: str | dict[str, Any] | None, tools: Sequence[Function]) -> None:
    """Raises InvalidRequest for a choice that is none, or that names no tool of the request."""
    if choice is None or choice in _FREE:
        return
    named = None
    if isinstance(choice, dict):
        function = choice.get("function")
        named = function.get("name") if isinstance(function, dict) else None
        if choice.get("type") != "function" or not isinstance(named, str):
            raise invalid(f"tool_choice: {_form()}, got {describe(choice)}", "tool_choice")
    elif choice not in _WORDS:
        raise invalid(f"tool_choice: {_form()}, got {describe(choice)}", "tool_choice")
    if not tools:
        raise invalid("tool_choice needs tools: add them, or remove it", "tool_choice")
    names = [tool.name for tool in tools]
    if named is not None and named not in names:
        raise invalid(
            f"tool_choice: no tool has the name {describe(named)}; the tools are "
            f"{', '.join(names[:10])}",
            "tool_choice",
        )


def _form() -> str:
    return 'must be auto, none, required or {"type": "function", "function": {"name": …}}'


def _of_object(schema: dict[str, Any]) -> dict[str, Any]:
    """Arguments are always an object."""
    return schema if "type" in schema or "$ref" in schema else {**schema, "type": "object"}
