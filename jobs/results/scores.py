"""The table of scores of a run: one row for each sample and metric, in one file for each metric.

    <results>/<run>/scores/<metric>.parquet

The files can be made again from the samples. Scoring by a metric again replaces its file, and no
reader ever sees a part of one. files.py reads and writes them: `Results.scores`, `write_scores`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.errors import invalid
from jobs.results.schema import TEXT, TIME

SCORES = "scores"
SCORES_VERSION = 1  # incremented when a column that has been written changes or is removed
SAMPLES_DIGEST = "chatjobs.samples"  # in the metadata of a file, see jobs.scores.freshness
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


def score_file(folder: Path, metric: str) -> Path:
    """The file of a metric in the folder of a run: one for each text of a metric."""
    if re.fullmatch(r"[a-z][a-z0-9+-]*", metric):
        return folder / SCORES / f"{metric}.parquet"
    plain = re.sub(r"[^A-Za-z0-9@+-]+", "-", metric)[:40].strip("-")
    digest = hashlib.sha256(metric.encode()).hexdigest()[:8]
    return folder / SCORES / f"{plain}-{digest}.parquet"


def read_score_files(files: Iterable[Path], columns: list[str] | None = None) -> Any:
    """The scores in files as a pyarrow.Table. `columns`: only these. Raises InvalidRequest for a
    file that can't be read."""
    wanted = SCORES_SCHEMA.names if columns is None else columns
    tables = [_table_of(file, wanted) for file in files]
    return pa.concat_tables(tables) if tables else SCORES_SCHEMA.empty_table().select(wanted)


def _table_of(file: Path, columns: list[str]) -> Any:
    try:
        return pq.read_table(file, columns=columns, schema=SCORES_SCHEMA, partitioning=None)
    except pa.ArrowException as error:
        fact = " ".join(str(error).split())
        raise invalid(f"{file} can't be read: remove it, and score again: {fact}", "run") from None
