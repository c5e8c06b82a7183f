"""The names of the fields of chat requests, and their values in cells of CSV and in options.

Imports little: every command reads it when it starts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from jobs.errors import InvalidRequest, invalid

Row = tuple[int, dict[str, Any] | InvalidRequest]  # number from 1; the error of a row without data

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
    from jobs.encoding import parse_written

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


def first_twice(names: Iterable[str]) -> str | None:
    """The first name that occurs again; None if all differ. A file may have 100,000 columns."""
    return next((name for name, count in Counter(names).items() if count > 1), None)


def mapped_twice(columns: Iterable[str], names: Mapping[str, str]) -> InvalidRequest:
    """The error of columns of which two hold one field. `names`: the fields, by columns."""
    columns = list(columns)
    new = [names.get(name, name) for name in columns]
    field = str(first_twice(new))
    both = " and ".join(repr(name) for name in columns if names.get(name, name) == field)
    return invalid(f"the columns {both} are both {field!r}: use another --map", field)
