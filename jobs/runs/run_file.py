"""Decides whether a run may go on, and keeps its state in run.json for `chatjobs run`.

The configuration is all that decides on the answers. A run whose configuration has changed is not
continued: its rows would not be comparable.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from jobs.errors import invalid
from jobs.results.files import Results
from jobs.results.run_json import CONFIGURATION, RunJson

State = Literal["running", "interrupted", "done"]

MAX_SHOWN = 60  # characters of a value in a sentence


class RunFile:
    """run.json of one run. Other fields of the file are kept."""

    def __init__(self, results: Results, run: str) -> None:
        self._folder, self._run = results.root / run, run
        self._results = results

    def check(self, configuration: Mapping[str, Any]) -> None:
        """Raise InvalidRequest if the run exists and was made with another configuration, or by
        other means, and if its run.json can't be read. A `limit` may grow."""
        known = RunJson.read(self._folder).configuration
        if known is None:
            if self._run in self._results.runs():
                raise invalid(
                    f"run {self._run!r} in {self._results.root} was not made by chatjobs run: "
                    "choose another --run",
                    "run",
                )
            return
        changed = list(changes(known, configuration))
        if changed:
            raise invalid(
                f"run {self._run!r} has rows of another configuration ({'; '.join(changed)}): "
                "choose another --run, or undo the change to go on",
                "run",
            )

    def write(self, configuration: Mapping[str, Any], state: State, **facts: Any) -> None:
        """Raises InvalidRequest if run.json can't be read, and OSError."""
        content = {
            **RunJson.read(self._folder).content,
            "run_id": self._run,
            CONFIGURATION: dict(configuration),
            "configuration_hash": hash_of(configuration),
            "state": state,
            **facts,
        }
        RunJson(content).write(self._folder)


def hash_of(configuration: Mapping[str, Any]) -> str:
    """SHA-256 of a configuration, without `limit`: more rows are the same run."""
    content = {name: value for name, value in configuration.items() if name != "limit"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def changes(old: Mapping[str, Any], new: Mapping[str, Any], inside: str = "") -> Iterator[str]:
    """Yield a clause for each value that differs: "temperature: 0 → 1"."""
    for name in dict.fromkeys((*new, *old)):
        before, after = old.get(name), new.get(name)
        if before == after or (not inside and name == "limit" and _grows(before, after)):
            continue
        if isinstance(before, dict) and isinstance(after, dict):
            yield from changes(before, after, f"{inside}{name}.")
        elif name == "content":
            yield f"the content of the {inside.rstrip('.')} has changed"
        else:
            yield f"{inside}{name}: {_shown(before)} → {_shown(after)}"


def _grows(before: Any, after: Any) -> bool:
    """True if a run with another limit has all rows of the one before. None: no limit."""
    return after is None or (before is not None and before <= after)


def _shown(value: Any) -> str:
    text = "none" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
