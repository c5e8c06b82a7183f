"""The prompt of a row from its columns, by a Jinja template in a sandbox of the worker package."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

from jobs.cli.field_options import SOURCES
from jobs.errors import InvalidRequest, JobError, invalid


class Sandbox(Protocol):
    """Renders untrusted templates. Raises JobError."""

    def check(self, template: str) -> None: ...

    def render(self, template: str, values: Mapping[str, Any]) -> str: ...


class RowTemplate:
    """A template for all rows of a data set. Raises JobError for one that is not valid."""

    def __init__(self, text: str, names: Mapping[str, str]) -> None:
        """`names`: fields of rows by the columns that hold them, of --map."""
        self.text = text
        self._columns = {field: column for column, field in names.items()}
        self._sandbox = _sandbox()
        try:
            self._sandbox.check(text)
        except JobError as error:
            raise invalid(error.message, "template") from None

    def apply(self, data: dict[str, Any], field: str) -> dict[str, Any] | InvalidRequest:
        """The row with the rendered text in a field, in place of any prompt that it has; or why it
        has none."""
        if "body" in data:
            return invalid("a template can't be used with a line of an OpenAI batch file: omit it")
        values = {self._columns.get(name, name): value for name, value in data.items()} | data
        try:
            prompt = self.render(values)
        except JobError as error:
            return invalid(error.message, "template")
        rest = {name: value for name, value in data.items() if name not in SOURCES}
        return {**rest, field: prompt}

    def render(self, values: Mapping[str, Any]) -> str:
        """The prompt of values by their names. Raises JobError."""
        return self._sandbox.render(self.text, _as_json(values))


def _as_json(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Values of typed columns that JSON lacks, such as times, become their text."""
    try:
        json.dumps(values)
        return values
    except TypeError:
        found: dict[str, Any] = json.loads(json.dumps(values, default=str))
        return found


def _sandbox() -> Sandbox:
    from importlib.metadata import entry_points

    (plugin,) = entry_points(group="chatjobs.templates", name="rows")
    made: Sandbox = plugin.load()()
    return made
