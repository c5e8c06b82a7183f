"""The option `-o KEY=VALUE`: fields of chat requests on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import cache
from shlex import quote
from typing import Any

import click
from click.decorators import FC

from jobs.encoding import DuplicateKey, parse_written


def fields_option(
    reserved: Mapping[str, str],
    help: str = "Field of the request, such as temperature=0 or max_tokens=64; repeatable.",
    known: Callable[[click.Context], tuple[str, ...]] | None = None,
) -> Callable[[FC], FC]:
    """Return the option. `reserved`: fields that it refuses, with what sets them instead. `known`:
    the fields that it takes, by the options before it; by default those of a chat request."""

    def parse(ctx: click.Context, param: click.Parameter, pairs: tuple[str, ...]) -> dict[str, Any]:
        names = request_fields() if known is None else known(ctx)
        fields: dict[str, Any] = {}
        for pair in pairs:
            name, equals, value = pair.partition("=")
            if not equals:
                raise click.BadParameter(f"{pair!r} is not KEY=VALUE")
            field, _, inner = name.partition(".")
            setter = reserved.get(name, reserved.get(field))
            if setter is not None:
                raise click.BadParameter(f"{name} is set by {setter}")
            if inner and field in names:
                raise click.BadParameter(_as_json(field, inner, value))
            if name not in names:
                raise click.BadParameter(unknown_field(name, names))
            try:
                fields[name] = field_value(name, value)
            except DuplicateKey as error:
                raise click.BadParameter(error.at(name)) from None
        return fields

    return click.option(
        "-o",
        "--option",
        "fields",
        multiple=True,
        callback=parse,
        metavar="KEY=VALUE",
        help=help,
    )


def _as_json(field: str, inner: str, value: str) -> str:
    """The error of a name such as job.priority, with the option that gives the same value."""
    try:
        data = field_value(inner, value)
    except DuplicateKey as error:
        return error.at(f"{field}.{inner}")
    for part in reversed(inner.split(".")):
        data = {part: data}
    option = quote(f"{field}={json.dumps(data)}")
    return f"-o takes the names of whole fields: -o {option} gives {field}.{inner}"


# A row of a file has one of these; an error distinguishes a null from a column that is missing.
SOURCES = ("messages", "prompt", "text")

# Fields whose value is text, and the kinds of JSON that they may have beside it.
TEXT_FIELDS: dict[str, tuple[type, ...]] = {
    "model": (),
    "request_id": (),
    "stop": (str, list, type(None)),
    "user": (),
}


def field_value(name: str, text: str) -> Any:
    """Parse the value of a field as JSON; what is not valid JSON is taken as a string. Raises
    DuplicateKey."""
    try:
        value, duplicate = parse_written(text)
    except (ValueError, RecursionError):
        return text
    if not isinstance(value, TEXT_FIELDS.get(name, object)):
        return text
    if duplicate is not None:
        raise duplicate
    return value


@cache
def request_fields() -> tuple[str, ...]:
    """Return all names that a request may have at its top level, sorted; also refused ones, whose
    error says what to do instead."""
    from jobs.api.request import ChatRequest
    from jobs.api.unsupported_fields import IGNORED_FIELDS, REFUSED_FIELDS

    return tuple(
        sorted({*ChatRequest.model_fields, *IGNORED_FIELDS, *REFUSED_FIELDS, "request_id"})
    )


def unknown_field(name: str, known: tuple[str, ...]) -> str:
    """Say that `name` is unknown, and what may be meant."""
    close = get_close_matches(name, known, 1)
    hint = f"did you mean '{close[0]}'?" if close else f"known fields: {', '.join(known)}"
    return f"unknown field '{name}'; {hint}"
