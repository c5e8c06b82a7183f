"""run.json of a run: its keys and their types. All of chatjobs reads and writes the file here.

The recorder and FakeWorker write it for a run that has none, with the versions of the engine.
`chatjobs run` adds its configuration, the state of the run and its last audit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.encoding import encodable
from jobs.errors import InvalidRequest, invalid
from jobs.results.card import write_card
from jobs.results.json_file import TYPE_NAMES, read_object, type_name
from jobs.results.unfinished import write_text

RUN_JSON = "run.json"
CONFIGURATION = "configuration"
VERSIONS = ("schema_version", "engine", "engine_version", "torch_version")

# The types of values that chatjobs reads, by the keys that lead to them. Any value may be null.
TYPES: dict[tuple[str, ...], type] = {
    ("run_id",): str,
    **{(name,): int if name == "schema_version" else str for name in VERSIONS},
    ("state",): str,
    ("configuration_hash",): str,
    ("expected",): int,
    (CONFIGURATION,): dict,
    (CONFIGURATION, "limit"): int,
    (CONFIGURATION, "data set"): dict,
    (CONFIGURATION, "data set", "content"): str,
    ("audit",): dict,
    ("audit", "rows_in"): int,
    ("audit", "samples"): int,
}


@dataclass(frozen=True, slots=True)
class RunJson:
    """The content of run.json. Keys that this version does not know are kept."""

    content: Mapping[str, Any]

    @classmethod
    def read(cls, run_dir: Path) -> RunJson:
        """The run.json of a run; without content if there is none. Raises InvalidRequest if it
        can't be read, is no JSON object, or has a value of another type."""
        file = run_dir / RUN_JSON
        content = read_object(file, _unusable)
        if content is None:
            return cls({})
        for keys, kind in TYPES.items():
            value = _value(content, keys)
            if value is not None and type(value) is not kind:
                names = f"{type_name(value)}, not {TYPE_NAMES[kind]}"
                raise _unusable(f"{'.'.join(keys)} in {file} is {names}")
        return cls(content)

    def write(self, run_dir: Path) -> None:
        """Replace the run.json of a run, and the data-set card before it, each atomically. Raises
        OSError."""
        text = json.dumps(dict(self.content), indent=2, ensure_ascii=False, sort_keys=True)
        write_card(run_dir)
        write_text(run_dir, RUN_JSON, encodable(text) + "\n")

    @property
    def configuration(self) -> dict[str, Any] | None:
        """All that decides on the answers; None if `chatjobs run` has not made the run."""
        found: dict[str, Any] | None = self.content.get(CONFIGURATION)
        return found

    @property
    def data_set(self) -> str | None:
        """The digest of the data set; None if it is not known."""
        found: str | None = _value(self.content, (CONFIGURATION, "data set", "content"))
        return found

    @property
    def state(self) -> str | None:
        """running, interrupted or done; None if `chatjobs run` has not made the run."""
        found: str | None = self.content.get("state")
        return found

    @property
    def expected(self) -> int | None:
        """Samples of the whole run: as the last audit has counted them, about before it."""
        if self.state == "done" and self.size is not None:
            return self.size[0] * self.size[1]
        found: int | None = self.content.get("expected")
        return found

    @property
    def size(self) -> tuple[int, int] | None:
        """Rows of the data set, and samples of each row; None before the first audit."""
        rows, samples = (_value(self.content, ("audit", name)) for name in ("rows_in", "samples"))
        return (rows, samples) if rows is not None and (samples or 0) > 0 else None


def _value(content: Any, keys: tuple[str, ...]) -> Any:
    """The value to which keys lead; None if there is none."""
    for key in keys:
        content = content.get(key) if isinstance(content, Mapping) else None
    return content


def _unusable(fact: str) -> InvalidRequest:
    return invalid(
        f"{fact}: restore it, or remove it (the run is then read as one that chatjobs run has not "
        "made)",
        "run",
    )
