"""Grammars of tool calls, in the syntax in which a model writes them; `worker.text` reads them.

Arguments follow the schema of the function: as JSON, or as the text of one value where the syntax
writes strings without quotes.
"""

from __future__ import annotations

import keyword
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jobs.api import grammar
from jobs.api.grammar import Grammar, Parts, named, quoted
from jobs.api.tool_choice import Forced
from jobs.errors import invalid
from worker.text import tool_json, tool_xml

Write = Callable[[str], str]  # a text as Lark's literal, or as the special token that it is
_ANY = r"/(?s:.*)/"
_IN_QUOTES = frozenset(("integer", "number", "boolean", "array", "object", "null"))
# Escapes that are the same in JSON and in Python.
_PYTHON_ESCAPES = 'nrtbf\\"'


class _Rules:
    """Rules of Lark that are written one after another, and the grammars that they include."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.parts: Parts = []

    def add(self, body: str, *, suffix: str = "") -> str:
        """A new rule; returns its name."""
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}{suffix}: {body}")
        return name

    def json(self, schema: dict[str, Any], field: str, **options: Any) -> str:
        """JSON that a schema describes; returns how rules refer to it."""
        name = f"json{len(self.parts)}"
        self.parts += named(name, grammar.of_schema(schema, field, **options))
        return f"@{name}"


def call_grammar(
    name: str, syntax: str, tools: Sequence[Forced], write: Write, *, several: bool
) -> Parts:
    """A call of one of some functions, or several calls. `name`: of the grammar. Raises
    InvalidRequest."""
    rules = _Rules()
    calls = " | ".join([_CALLS[syntax](tool, rules, write) for tool in tools])
    call = rules.add(calls)
    opening, separator, closing = _AROUND[syntax]
    more = f"({quoted(separator)} {call})*" if several else ""
    start = f"start: {opening} {call} {more} {closing}"
    return [{"name": name, "lark_grammar": "\n".join([start, *rules.lines])}, *rules.parts]


def _hermes(tool: Forced, rules: _Rules, write: Write) -> str:
    opening, closing = write(tool_json.OPENING), write(tool_json.CLOSING)
    head, end = quoted(f'\n{{"name": "{tool.name}", "arguments": '), quoted("}\n")
    return f"{opening} {head} {rules.json(tool.parameters, tool.field)} {end} {closing}"


def _llama(tool: Forced, rules: _Rules, write: Write) -> str:
    head = quoted(f'{{"name": "{tool.name}", "parameters": ')
    return f"{head} {rules.json(tool.parameters, tool.field)} {quoted('}')}"


def _qwen(tool: Forced, rules: _Rules, write: Write) -> str:
    opening, closing = write(tool_xml.OPENING), write(tool_xml.CLOSING)
    end = f"\n{tool_xml.PARAMETER_END}\n"
    found = []
    for key, schema, required in _parameters(tool):
        head = quoted(f"{tool_xml.PARAMETER}{key}>\n")
        value = _xml_value(schema, rules, end, tool.field)
        found.append(rules.add(f"{head} {value}") + ("" if required else "?"))
    begin = quoted(f"\n{tool_xml.FUNCTION}{tool.name}>\n")
    finish = quoted(f"{tool_xml.FUNCTION_END}\n")
    return " ".join([opening, begin, *found, finish, closing])


def _xml_value(schema: dict[str, Any], rules: _Rules, end: str, field: str) -> str:
    """A value, and the tag after it."""
    choices = schema.get("enum")
    if choices and all(isinstance(one, str) for one in choices):
        return f"({' | '.join(map(quoted, choices))}) {quoted(end)}"
    kind = schema.get("type")
    if kind in _IN_QUOTES if isinstance(kind, str) else False:
        return f"{rules.json(schema, field)} {quoted(end)}"
    return rules.add(_ANY, suffix=f"[suffix={quoted(end)}]")


def _pythonic(tool: Forced, rules: _Rules, write: Write) -> str:
    if not _is_name(tool.name):
        raise invalid(f"tool_choice: {tool.name!r} is no name in Python: rename it", "tools")
    # From behind: the arguments from one on, if some came before, or if none did.
    after, first = rules.add('""'), rules.add('""')
    for key, schema, required in reversed([*_parameters(tool)]):
        if not _is_name(key):
            raise invalid(f"{tool.field}: {key!r} is no name in Python: rename it", tool.field)
        value = rules.json(schema, tool.field, json_allowed_escapes=_PYTHON_ESCAPES)
        begin = f"{quoted(key + '=')} {value} {after}"
        then = f"{quoted(', ')} {begin}"
        after, first = (
            rules.add(then if required else f"{then} | {after}"),
            rules.add(begin if required else f"{begin} | {first}"),
        )
    return f"{quoted(tool.name + '(')} {first} {quoted(')')}"


def _is_name(text: str) -> bool:
    return text.isidentifier() and not keyword.iskeyword(text)


def _parameters(tool: Forced) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """The parameters of a function in the order of its schema: name, schema, whether it must be
    there. Raises InvalidRequest for a schema of another form."""
    schema = tool.parameters
    other = schema.keys() & {"$ref", "anyOf", "allOf", "oneOf"}
    if other:
        raise invalid(
            f"{tool.field}: the calls of this model name each parameter, so they must be in "
            f"properties, got {min(other)}",
            tool.field,
        )
    shared: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    required = schema.get("required") or ()
    for key, value in (schema.get("properties") or {}).items():
        yield key, {**(value if isinstance(value, dict) else {}), **shared}, key in required


_CALLS: dict[str, Callable[[Forced, _Rules, Write], str]] = {
    "hermes": _hermes,
    "llama3_json": _llama,
    "pythonic": _pythonic,
    "qwen3_coder": _qwen,
}
# Before the calls, between two of them, and after them.
_AROUND = {
    "hermes": ("", "\n", ""),
    "llama3_json": ("", "; ", ""),
    "pythonic": (quoted("["), ", ", quoted("]")),
    "qwen3_coder": ("", "\n", ""),
}


def forced_calls(
    name: str, tools: Sequence[Forced], syntax: str | None, write: Write, *, several: bool
) -> tuple[Parts, Grammar]:
    """The grammar of an answer that must call one of some functions, and what the request gave.
    Raises InvalidRequest."""
    if syntax is None:
        raise invalid(
            "tool_choice: only auto and none are possible, since the syntax in which this model "
            "writes calls is not known: start the worker with --tool-parser NAME",
            "tool_choice",
        )
    parts = call_grammar(name, syntax, tools, write, several=several)
    return parts, Grammar("[{}]", "tool_choice")
