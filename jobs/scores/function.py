"""A metric that is a Python function of the user: `module:function` or `file.py:function`."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import json
import numbers
import os
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from types import ModuleType
from typing import Any

from jobs.errors import invalid
from jobs.scores.outcome import Outcome, Row

FIELDS = ("value", "label", "answer", "explanation")


class Function:
    """Calls the function with a dict of the row's columns. It returns a number, a bool, or a dict
    with `value` and any of `label`, `answer` and `explanation`."""

    def __init__(self, reference: str, metrics: Collection[str]) -> None:
        """`metrics`: the names that may be meant instead of a module."""
        self._function = found(reference, metrics)

    def score(self, row: Row) -> Outcome:
        metadata = json.loads(row.get("metadata") or "{}")
        returned = self._function({**row, "metadata": metadata})
        fields = returned if isinstance(returned, dict) else {"value": returned}
        unknown = [name for name in fields if name not in FIELDS]
        if unknown or "value" not in fields:
            raise TypeError(
                f"the function returned a dict with {', '.join(map(str, fields))}: "
                f"it may have {', '.join(FIELDS)}, and must have value"
            )
        value = fields["value"]
        if not isinstance(value, numbers.Real) and not hasattr(value, "__float__"):
            raise TypeError(f"the function returned {value!r}, which is no number")
        label, answer, explanation = (_text(fields.get(name)) for name in FIELDS[1:])
        return Outcome(float(value), label, answer, explanation)


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def found(reference: str, metrics: Collection[str]) -> Callable[[dict[str, Any]], Any]:
    """The function. Raises InvalidRequest."""
    place, _, name = reference.rpartition(":")
    if place.endswith(".py") and not Path(place).is_file():
        raise invalid(f"there is no file {place!r} with the metric {name!r}", "metric")
    try:
        module = _from_file(Path(place)) if place.endswith(".py") else _from_path(place)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == place.partition(".")[0]:
            near = difflib.get_close_matches(place, metrics, 1)
            meant = f" (did you mean the metric {near[0]}?)" if near else ""
            raise invalid(
                f"{reference!r} is a function in a module, and there is no module {error.name!r}"
                f"{meant}",
                "metric",
            ) from None
        raise invalid(
            f"{place} can't be imported: {type(error).__name__}: {error}", "metric"
        ) from None
    function = getattr(module, name, None)
    if not callable(function):
        near = difflib.get_close_matches(name, vars(module), 1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise invalid(f"{place} has no function {name!r}{meant}", "metric")
    return function  # type: ignore[no-any-return]


def _from_path(name: str) -> ModuleType:
    sys.path.insert(0, os.getcwd())
    return importlib.import_module(name)


def _from_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"metric_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError("it is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.parent.absolute()))
    spec.loader.exec_module(module)
    return module
