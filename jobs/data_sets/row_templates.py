"""Texts of a row from its columns, by a Jinja template in a sandbox of the worker package."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

from jobs.errors import InvalidRequest, JobError, invalid


class Sandbox(Protocol):
    """Renders untrusted templates. Raises JobError."""

    def check(self, template: str) -> None: ...

    def render(self, template: str, values: Mapping[str, Any]) -> str: ...


MAX_BROKEN = 3  # of the first rows: those for which a template takes too long, some seconds each


class BrokenTemplate(InvalidRequest):
    """The fault is the template's, not the row's: it exceeds the limits of the sandbox, or is
    blocked by it."""


class RowTemplate:
    """A template for all rows of a data set. Raises JobError for one that is not valid."""

    def __init__(self, text: str, names: Mapping[str, str], kind: str = "prompt template") -> None:
        """`names`: fields of rows by the columns that hold them, of --map. `kind`: the name of the
        template in errors."""
        self.text = text
        self._columns = {field: column for column, field in names.items()}
        self._sandbox = _sandbox(kind)
        try:
            self._sandbox.check(text)
        except JobError as error:
            raise invalid(error.message, "template") from None

    def fill(self, data: Mapping[str, Any]) -> str:
        """The text of a row. Raises InvalidRequest."""
        if "body" in data:
            raise invalid("a template can't be used with a line of an OpenAI batch file: omit it")
        values = {self._columns.get(name, name): value for name, value in data.items()}
        return self.render({**values, **data})

    def render(self, values: Mapping[str, Any]) -> str:
        """The text of values by their names. Raises InvalidRequest."""
        try:
            return self._sandbox.render(self.text, _as_json(values))
        except JobError as error:
            kind = InvalidRequest if error.code == "invalid_request" else BrokenTemplate
            raise kind("invalid_request", error.message, "template") from None


def _as_json(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Values of typed columns that JSON lacks, such as times, become their text."""
    try:
        json.dumps(values)
        return values
    except TypeError:
        found: dict[str, Any] = json.loads(json.dumps(values, default=str))
        return found


def _sandbox(kind: str) -> Sandbox:
    from importlib.metadata import entry_points

    (plugin,) = entry_points(group="chatjobs.templates", name="rows")
    made: Sandbox = plugin.load()(kind)
    return made
