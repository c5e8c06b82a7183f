"""The table of scores of a run: one row for each sample and metric, in one file for each metric.

    <results>/<run>/scores/<metric>.parquet

The files can be made again from the samples. Scoring by a metric again replaces its file, and no
reader ever sees a part of one.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.errors import invalid
from jobs.results.files import TEMPORARY, Results, write_tables
from jobs.results.schema import TEXT, TIME

SCORES = "scores"
SCORES_VERSION = 1  # incremented when a column that has been written changes or is removed
KEY = ("row_index", "repeat_index", "choice_index")
FIGURES = (*KEY, "metric", "status", "value", "statistics")  # the columns that figures are made of


def _field(name: str, kind: pa.DataType, description: str, *, nullable: bool = False) -> pa.Field:
    return pa.field(name, kind, nullable, metadata={"description": description})


SCORES_SCHEMA = pa.schema(
    [
        _field("schema_version", pa.int16(), "version of these columns"),
        _field("run_id", TEXT, "run of the sample"),
        _field("model", TEXT, "model of the sample"),
        _field("row_index", pa.int64(), "row in the input data set, as in samples"),
        _field("repeat_index", pa.int32(), "which sample of the input row, as in samples"),
        _field("choice_index", pa.int16(), "index of the answer, as in samples"),
        _field("metric", TEXT, "the metric with its argument, as it was asked for"),
        _field("status", TEXT, "ok; no_answer: the job failed; error: the metric did"),
        _field(
            "value",
            pa.float64(),
            "the score; 1 and 0 for right and wrong; null unless ok",
            nullable=True,
        ),
        _field("label", TEXT, "name of the outcome, of metrics that give one", nullable=True),
        _field("answer", TEXT, "what was compared with the target", nullable=True),
        _field(
            "explanation",
            TEXT,
            "why the value is what it is, of metrics that say it",
            nullable=True,
        ),
        _field("error", TEXT, "why there is no value", nullable=True),
        _field(
            "statistics",
            pa.list_(pa.float64()),
            "parts of a figure that is no mean of values",
            nullable=True,
        ),
        _field("scorer_version", TEXT, "version of the package that computed the value"),
        _field("created_at", TIME, "when the metric was started"),
    ],
    metadata={"chatjobs.scores_version": str(SCORES_VERSION)},
)


def write_scores(results: Results, run: str, name: str, tables: Iterable[pa.Table]) -> Path:
    """Write the tables, which are SCORES_SCHEMA's, as the file `name` of a run, in place of one
    that is there. Returns its path. If it raises, nothing has changed."""
    folder = results.path(run)
    temporary = folder / TEMPORARY / f"{name}.{uuid.uuid4().hex}"
    final = folder / SCORES / name
    try:
        write_tables(temporary, final, tables, SCORES_SCHEMA)
    finally:
        temporary.unlink(missing_ok=True)
    return final


def read_scores(
    results: Results,
    run: str,
    names: Iterable[str] | None = None,
    columns: Sequence[str] | None = None,
) -> Any:
    """The scores of a run as a pyarrow.Table. `names`: of these files only. `columns`: only
    these. Raises InvalidRequest for a file that can't be read."""
    folder = results.path(run) / SCORES
    files = sorted(folder.glob("*.parquet")) if names is None else [folder / one for one in names]
    wanted = SCORES_SCHEMA.names if columns is None else list(columns)
    tables = [_table_of(file, wanted) for file in files]
    return pa.concat_tables(tables) if tables else SCORES_SCHEMA.empty_table().select(wanted)


def _table_of(file: Path, columns: list[str]) -> Any:
    try:
        return pq.read_table(file, columns=columns, schema=SCORES_SCHEMA, partitioning=None)
    except pa.ArrowException as error:
        fact = " ".join(str(error).split())
        raise invalid(f"{file} can't be read: remove it, and score again: {fact}", "run") from None
