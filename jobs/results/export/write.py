"""Writes the rows of a run to one file, in an order. The file appears when it is complete."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from jobs.disk import part_of
from jobs.results.export.cells import csv_text
from jobs.results.export.formats import Format, Order
from jobs.results.export.openai_batch import batch_lines
from jobs.results.export.ordered import COMMON_COLUMNS, ordered_tables
from jobs.results.files import Results, write_tables
from jobs.results.output_file import (
    check_output,
    full_disk_named,
    replaced,
    replaced_together,
)
from jobs.results.schema import SCHEMA

ERROR_SUFFIX = ".errors"


class Written(NamedTuple):
    """A file and its rows or lines."""

    path: Path
    rows: int


def export_columns(*, every: bool) -> list[str]:
    """The columns of an exported file: the common ones, or these and all others."""
    rest = [name for name in SCHEMA.names if name not in COMMON_COLUMNS]
    return [*COMMON_COLUMNS, *(rest if every else ())]


def text_parts(
    results: Results, run: str, form: Format, columns: Sequence[str], order: Order = "input"
) -> Iterator[tuple[str, int]]:
    """The text of a JSONL or CSV file in parts, each with its number of rows."""
    if form == "csv":
        yield csv_text([columns]), 0
    for table in ordered_tables(results, run, columns, order):
        rows = table.to_pylist()
        if form == "csv":
            yield csv_text(row.values() for row in rows), len(rows)
        else:
            yield "".join(f"{_json(row)}\n" for row in rows), len(rows)


def write_export(
    results: Results,
    run: str,
    form: Format,
    path: Path,
    *,
    every: bool = False,
    order: Order = "input",
) -> list[Written]:
    """Write a run to `path`; batch files also to `errors_path(path)`. `every`: all columns. Raises
    InvalidRequest for a path that can't be written to, and for what `batch_lines` refuses."""
    check_output(path)
    if form == "openai-batch":
        return _write_batch(results, run, path, order)
    columns = export_columns(every=every)
    if form == "parquet":
        return [_write_parquet(results, run, path, columns, order)]
    count = 0
    with replaced(path) as file:
        for text, rows in text_parts(results, run, form, columns, order):
            file.write(text)
            count += rows
    return [Written(path, count)]


def errors_path(path: Path) -> Path:
    """The error file beside an output file: batch.jsonl → batch.errors.jsonl."""
    return path.with_name(f"{path.stem}{ERROR_SUFFIX}{path.suffix}")


def _write_batch(results: Results, run: str, path: Path, order: Order) -> list[Written]:
    """Both files are written, so that no error file of an earlier export stays beside a new output
    file. The output file appears last."""
    paths, counts = (path, errors_path(path)), [0, 0]
    with replaced_together(paths) as files:
        for line in batch_lines(results, run, order):
            which = 0 if line.is_answer else 1
            files[which].write(f"{_json(line.content)}\n")
            counts[which] += 1
    return [Written(*one) for one in zip(paths, counts, strict=True)]


def _write_parquet(
    results: Results, run: str, path: Path, columns: Sequence[str], order: Order
) -> Written:
    count = 0
    schema = pa.schema([SCHEMA.field(name) for name in columns], SCHEMA.metadata)

    def tables() -> Iterator[pa.Table]:
        nonlocal count
        for table in ordered_tables(results, run, columns, order):
            count += len(table)
            yield table.cast(schema)

    part = part_of(path)
    try:
        with full_disk_named(path):
            write_tables(part, path, tables(), schema)
    finally:
        part.unlink(missing_ok=True)
    return Written(path, count)


def _json(value: Any) -> str:
    """One line of JSON; a number that is not finite is null."""
    try:
        return _dumps(value)
    except ValueError:
        return _dumps(_finite(value))


def _dumps(value: Any) -> str:
    return json.dumps(
        value,
        ensure_ascii=False,
        allow_nan=False,
        separators=(",", ":"),
        default=datetime.isoformat,
    )


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
