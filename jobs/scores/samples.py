"""Columns of a run's samples, in the form in which scores refer to them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from jobs.errors import invalid
from jobs.results.files import Results
from jobs.results.schema import SCHEMA
from jobs.results.scores import KEY

BATCH_ROWS = 256
GROUP = pa.field("group", pa.int32())


def sample_batches(
    results: Results, run: str, columns: Sequence[str]
) -> Iterator[list[dict[str, Any]]]:
    """The rows of a run, a few at a time, with these columns; in no particular order."""
    for batch in results.dataset(run).to_batches(columns=list(columns), batch_size=BATCH_ROWS):
        yield batch.to_pylist()


class Groups(NamedTuple):
    """The groups of a run's samples. `by`: what makes them. `values`: of each group, a text for
    each `by`. `table`: a pyarrow.Table of the keys of the samples and the place of their group in
    `values`, in the column `group`."""

    by: Sequence[str]
    values: Sequence[tuple[str | None, ...]]
    table: Any


def read_groups(results: Results, run: str, by: Sequence[str]) -> Groups:
    """The groups by columns, or by fields of the metadata, such as columns that were kept. Raises
    InvalidRequest if no sample has such a field."""
    columns = [name if name in SCHEMA.names else "metadata" for name in by]
    rows = results.dataset(run)
    places: dict[tuple[str | None, ...], int] = {}
    tables = [
        rows.schema.empty_table().select([*KEY]).append_column(GROUP, pa.array([], GROUP.type))
    ]
    for batch in rows.to_batches(columns=list(dict.fromkeys([*KEY, *columns]))):
        labels = [
            _labels(batch[column].to_pylist(), None if name == column else name)
            for name, column in zip(by, columns, strict=True)
        ]
        numbers = [places.setdefault(one, len(places)) for one in zip(*labels, strict=True)]
        keys = pa.Table.from_batches([batch]).select([*KEY])
        tables.append(keys.append_column(GROUP, pa.array(numbers, GROUP.type)))
    for number, (name, column) in enumerate(zip(by, columns, strict=True)):
        if name != column and places and all(one[number] is None for one in places):
            raise invalid(
                f"run {run} has no column {name!r}, and no such field in its metadata: "
                f"{_found(rows)}",
                "by",
            )
    return Groups(by, list(places), pa.concat_tables(tables))


def grouped(scores: Any, groups: Groups) -> Iterator[tuple[dict[str, str | None], Any]]:
    """The rows of each group of a table with the keys of samples, in the order of the groups'
    values. Rows whose sample is gone are in none."""
    keys = scores.select([*KEY])
    keys = keys.append_column("place", pa.array(range(len(scores)), pa.int64()))
    joined = keys.join(groups.table, [*KEY], join_type="inner")
    joined = joined.sort_by([("group", "ascending"), ("place", "ascending")])
    parts, start = {}, 0
    for one in joined["group"].value_counts().to_pylist():
        parts[groups.values[one["values"]]] = joined["place"].slice(start, one["counts"])
        start += one["counts"]
    for group in sorted(parts, key=lambda one: [(text is not None, text or "") for text in one]):
        yield dict(zip(groups.by, group, strict=True)), scores.take(parts[group])


def _labels(values: Sequence[Any], field: str | None) -> list[str | None]:
    """The values of a column as text, or of a field of a column of JSON."""
    return [_text(one if field is None else _field(one, field)) for one in values]


def _field(metadata: str | None, name: str) -> Any:
    content = json.loads(metadata) if metadata else None
    return content.get(name) if isinstance(content, dict) else None


def _found(rows: Any) -> str:
    """The fields of the first metadata, for an error."""
    first = rows.head(1, columns=["metadata"], filter=pc.field("metadata").is_valid())
    content = json.loads(first["metadata"][0].as_py()) if len(first) else None
    if not isinstance(content, dict):
        return "chatjobs run --keep COLUMN keeps columns of a data set there"
    return f"its fields are {', '.join(content)}"


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, default=str)
