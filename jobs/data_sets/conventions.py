"""The columns that hold the fields of rows by convention, such as question and answer."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jobs.data_sets.fields import SOURCES
from jobs.data_sets.requests import Overrides
from jobs.data_sets.row_files import opened_rows
from jobs.errors import InvalidRequest

# Columns that hold the prompt and the expected answer, where no column has the name of a field.
PAIRS = (("question", "answer"), ("instruction", "output"), ("input", "output"))
# And those of multiple choice.
CHOICES = ("options", "endings")
RIGHT_CHOICE = ("answer", "answerKey", "label")


def with_conventions(overrides: Overrides, files: Sequence[Path]) -> Overrides:
    """The overrides with the names of the columns that hold prompt and target, if no column has the
    name of a field for the prompt. Raises InvalidRequest."""
    row = first_row(files, overrides.names)
    if "body" in row:
        return overrides
    found = conventions(row, overrides.mode)
    return replace(overrides, names={**found, **overrides.names})


def conventions(columns: Container[str], mode: str) -> dict[str, str]:
    """The fields of rows that columns hold by convention, by the names of these columns."""
    names: list[tuple[tuple[str, ...], str]] = []
    if not any(name in columns for name in SOURCES):
        prompt, target = next((pair for pair in PAIRS if pair[0] in columns), ("", ""))
        names += [((prompt,), "prompt"), ((target,), "target")]
    if mode == "choice":
        names += [(CHOICES, "choices"), (RIGHT_CHOICE, "target")]
    found: dict[str, str] = {}
    for candidates, field in names:
        column = next((name for name in candidates if name in columns), None)
        if column is not None and field not in columns and field not in found.values():
            found[column] = field
    return found


def first_row(files: Sequence[Path], names: Mapping[str, str]) -> dict[str, Any]:
    """The first row that is no error, of the first file that has one; empty if there is none.
    `names`: fields of a row by the names of their columns."""
    for file in files:
        with opened_rows(file, names) as rows:
            for _, row in rows:
                if not isinstance(row, InvalidRequest):
                    return row
    return {}
