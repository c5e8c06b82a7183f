"""The expected answer of a row, which the column `target` holds as text."""

from __future__ import annotations

import json
from typing import Protocol

from jobs.scores.outcome import Row

TARGET_KEY = ("row_index", "custom_id")  # columns by which targets of another place are found


class Targets(Protocol):
    """Targets that replace those of a run. digest: of all."""

    digest: str

    def of(self, row: Row) -> str | None:
        """The target of a row, which has the columns of TARGET_KEY; None if it has none."""


def target_of(row: Row) -> str:
    """The target. Raises ValueError if the row has none."""
    target = row.get("target")
    if not isinstance(target, str):
        raise ValueError("the row has no target")
    return target


def references(row: Row) -> list[str]:
    """The accepted answers: the strings in a target that is a JSON array of strings, else the
    target itself. Raises ValueError if the row has none."""
    target = target_of(row)
    if target.lstrip().startswith("["):
        try:
            values = json.loads(target)
        except (ValueError, RecursionError):
            return [target]
        if isinstance(values, list) and values and all(isinstance(one, str) for one in values):
            return values
    return [target]
