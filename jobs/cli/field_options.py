"""The option `-o KEY=VALUE`: fields of chat requests on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from shlex import quote
from typing import Any

import click
from click.decorators import FC

from jobs.data_sets.fields import field_value, request_fields


def fields_option(
    reserved: Mapping[str, str],
    help: str = "Field of the request, such as temperature=0 or max_tokens=64; repeatable.",
    known: Callable[[click.Context], tuple[str, ...]] | None = None,
) -> Callable[[FC], FC]:
    """Return the option. `reserved`: fields that it refuses, with what sets them instead. `known`:
    the fields that it takes, by the options before it; by default those of a chat request."""

    def parse(ctx: click.Context, param: click.Parameter, pairs: tuple[str, ...]) -> dict[str, Any]:
        from jobs.encoding import DuplicateKey

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
    from jobs.encoding import DuplicateKey

    try:
        data = field_value(inner, value)
    except DuplicateKey as error:
        return error.at(f"{field}.{inner}")
    for part in reversed(inner.split(".")):
        data = {part: data}
    option = quote(f"{field}={json.dumps(data)}")
    return f"-o takes the names of whole fields: -o {option} gives {field}.{inner}"


def unknown_field(name: str, known: tuple[str, ...]) -> str:
    """Say that `name` is unknown, and what may be meant."""
    close = get_close_matches(name, known, 1)
    hint = f"did you mean '{close[0]}'?" if close else f"known fields: {', '.join(known)}"
    return f"unknown field '{name}'; {hint}"
