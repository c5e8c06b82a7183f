"""Columns of a run's samples, in the form in which scores refer to them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from jobs.errors import invalid
from jobs.results.files import Results
from jobs.results.schema import SCHEMA
from jobs.results.scores import KEY

BATCH_ROWS = 256


def sample_batches(
    results: Results, run: str, columns: Sequence[str]
) -> Iterator[list[dict[str, Any]]]:
    """The rows of a run, a few at a time, with these columns; in no particular order."""
    for batch in results.dataset(run).to_batches(columns=list(columns), batch_size=BATCH_ROWS):
        yield batch.to_pylist()


class Groups(NamedTuple):
    """The groups of a run's samples. `by`: what makes them. `table`: a pyarrow.Table of the keys of
    the samples and their values of each `by` as text, in columns `by0`, `by1`, …"""

    by: Sequence[str]
    table: Any


def read_groups(results: Results, run: str, by: Sequence[str]) -> Groups:
    """The groups by columns, or by fields of the metadata, such as columns that were kept. Raises
    InvalidRequest if no sample has such a field."""
    columns = [name if name in SCHEMA.names else "metadata" for name in by]
    table = results.table(run, list(dict.fromkeys([*KEY, *columns])))
    parts = {name: table[name] for name in KEY}
    for number, (name, column) in enumerate(zip(by, columns, strict=True)):
        values = table[column].to_pylist()
        if name != column:
            values = [_field(one, name) for one in values]
            if not any(one is not None for one in values) and values:
                raise invalid(
                    f"run {run} has no column {name!r}, and no such field in its metadata: "
                    f"{_found(table[column].to_pylist())}",
                    "by",
                )
        parts[f"by{number}"] = pa.array([_text(one) for one in values], pa.string())
    return Groups(by, pa.table(parts))


def grouped(scores: Any, groups: Groups) -> Iterator[tuple[dict[str, str | None], Any]]:
    """The rows of each group of a table with the keys of samples, in the order of the groups'
    values. Rows whose sample is gone are in none."""
    keys = scores.select([*KEY])
    keys = keys.append_column("place", pa.array(range(len(scores)), pa.int64()))
    joined = keys.join(groups.table, [*KEY], join_type="inner")
    labels = [joined[f"by{number}"].to_pylist() for number in range(len(groups.by))]
    places: dict[tuple[str | None, ...], list[int]] = {}
    for *values, place in zip(*labels, joined["place"].to_pylist(), strict=True):
        places.setdefault(tuple(values), []).append(place)
    for group in sorted(places, key=lambda one: [(text is not None, text or "") for text in one]):
        named = dict(zip(groups.by, group, strict=True))
        yield named, scores.take(sorted(places[group]))


def _field(metadata: str | None, name: str) -> Any:
    content = json.loads(metadata) if metadata else None
    return content.get(name) if isinstance(content, dict) else None


def _found(metadata: Sequence[str | None]) -> str:
    """The fields of the first metadata, for an error."""
    content = next((json.loads(one) for one in metadata if one), None)
    if not isinstance(content, dict):
        return "chatjobs submit --keep COLUMN keeps columns of a data set there"
    return f"its fields are {', '.join(content)}"


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, default=str)
