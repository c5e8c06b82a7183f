"""The rows of a run that are in its Parquet files, read as the files appear.

Memory: one bit a row, and the names of the files. A row of a data set may have several samples,
which have consecutive numbers: `row * samples + repeat`, as in all of this package.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.api.row_keys import MAX_ROW
from jobs.errors import invalid
from jobs.results.files import SAMPLES, Results
from jobs.results.schema import foreign_fault
from jobs.results.superseded import without_superseded
from jobs.runs.row_set import RowSet

COLUMNS = (
    "row_index",
    "repeat_index",
    "choice_index",
    "status",
    "error_type",
    "output_tokens",
    "scored_tokens",
)
BATCH_ROWS = 8192


class WrittenRows:
    """The samples of one run, of which each row has `samples`. Call `refresh` to see what was
    written since."""

    def __init__(self, results: Results, run: str, samples: int = 1) -> None:
        self._folder, self._samples = results.root / run, samples
        self.clear()

    def clear(self) -> None:
        """Begin anew: rows were removed from the files."""
        self.rows = RowSet()
        self.failed = RowSet()
        self.errors: Counter[str] = Counter()  # samples by error code
        self.tokens = 0  # generated, or scored, in all rows
        self._files: set[str] = set()  # that were read
        self._listed: set[str] = set()  # names at the last look, without those that could not be
        self._faults: dict[Path, str] = {}  # files that could not be read then, and why

    def refresh(self) -> int:
        """Read the files that are new. Returns how many samples are new. A file that can't be read
        is tried again at the next call."""
        before = len(self.rows)
        self._faults = {}
        folder = self._folder / SAMPLES
        names = {name for name in _names_in(folder) if name.endswith(".parquet")}
        if names == self._listed:  # looks are many, and files as well
            return 0
        files = [folder / name for name in sorted(names)]
        for file in without_superseded(files, self._folder):
            if file.name not in self._files:
                try:
                    self._read(file)
                except (pa.ArrowException, OSError) as error:
                    self._faults[file] = " ".join(str(error).split())
                    names.discard(file.name)
                    continue
                self._files.add(file.name)
        self._listed = names
        return len(self.rows) - before

    def check(self) -> None:
        """Raise InvalidRequest if a file could not be read at the last `refresh`: its rows would
        be run again."""
        for file, reason in self._faults.items():
            raise invalid(
                f"{file} can't be read ({reason}): restore it, or delete it to run its rows again",
                "run",
            )

    def number_of(self, row: Any, repeat: Any) -> int | None:
        """The number of a sample; None for one that this run can't have: any program may have
        written a row."""
        if not (isinstance(row, int) and isinstance(repeat, int)):
            return None
        is_known = 0 <= row < MAX_ROW and 0 <= repeat < self._samples
        return row * self._samples + repeat if is_known else None

    def _read(self, file: Path) -> None:
        for row, repeat_index, choice, status, code, tokens, scored in read_columns(file, COLUMNS):
            self.tokens += tokens or scored or 0
            number = self.number_of(row, repeat_index)
            if choice or number is None:
                continue
            is_new = self.rows.add(number)
            if status == "ok":
                self.failed.discard(number)  # of an attempt before
            elif is_new:
                self.failed.add(number)
                self.errors[code or status] += 1


def _names_in(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):  # until the first file is written
        return []


def read_columns(file: Path, columns: tuple[str, ...]) -> Iterator[tuple[Any, ...]]:
    """The values of some columns of a file, row by row; 0 in a column that an older version has not
    written. Raises pyarrow.ArrowException, also for a file of another program, and OSError."""
    with pq.ParquetFile(file) as source:
        if fault := foreign_fault(source.schema_arrow):
            raise pa.ArrowInvalid(fault)
        known = set(source.schema_arrow.names)
        present = [name for name in columns if name in known]
        for batch in source.iter_batches(BATCH_ROWS, columns=present):
            values = [
                batch.column(name).to_pylist() if name in known else repeat(0, batch.num_rows)
                for name in columns
            ]
            yield from zip(*values, strict=True)
