"""Rows as CSV. Lists and objects are JSON. A cell that a spreadsheet would take for a formula gets
an apostrophe before it, which makes it text."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable
from datetime import datetime
from typing import Any

# ASCII and full-width characters that begin a formula; a tab or a line end may precede them.
FORMULA = re.compile("[\\s]*[=+\\-@\uff1d\uff0b\uff0d\uff20]|[\t\r\n]")
CRLF = "\r\n"
NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?")


def csv_text(rows: Iterable[Iterable[Any]]) -> str:
    """Rows of values as lines of CSV, which end in a newline."""
    lines = _Lines()
    csv.writer(lines, lineterminator=CRLF).writerows([map(cell, row) for row in rows])
    return "".join(lines)


class _Lines(list[str]):
    """Takes the lines of a csv.writer. It quotes a cell with a line end only if its own line end
    has that character, and so writes both."""

    def write(self, line: str) -> None:
        self.append(line.removesuffix(CRLF) + "\n")


def cell(value: Any) -> Any:
    """A value as the csv module takes it; null is an empty cell."""
    if isinstance(value, str):
        return defused(value)
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | dict):
        return object_text(value)
    return value


def object_text(value: list[Any] | dict[str, Any]) -> str:
    """A list or an object as JSON in a cell. Fields that are null are left out: a message has only
    those that it was sent with."""
    return json.dumps(_without_nulls(value), ensure_ascii=False, default=str)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(one) for name, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def defused(text: str) -> str:
    """A text that no spreadsheet executes. Numbers such as -5 are no formulas."""
    return f"'{text}" if FORMULA.match(text) and not NUMBER.fullmatch(text) else text
