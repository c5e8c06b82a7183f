"""Counts the rows of a run in its files, and compares them with the rows of its data set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.results.files import Results, dataset_of
from jobs.results.model_versions import Answers, is_mixture, read_answers
from jobs.runs.row_set import RowSet
from jobs.runs.written_rows import WrittenRows, read_columns

COLUMNS = ("row_index", "repeat_index", "choice_index", "status")


@dataclass(frozen=True, slots=True)
class Audit:
    """rows_in: of the data set. samples: of each row. rows: samples that are in the files. missing:
    samples that are not. twice: samples of which a choice is there twice. failed: samples with an
    error, or that were cancelled. foreign: rows in the files that the data set does not have.
    broken: files that can't be read. choices: rows of the samples in the files, which have one for
    each answer or continuation. superseded: rows that `Results` skips and other readers of Parquet
    see, since they are of older attempts or in files that were replaced. versions: the answers in
    the files, by the version of the model that has made them."""

    rows_in: int
    samples: int
    rows: int
    missing: int
    twice: int
    failed: int
    foreign: int
    broken: int
    choices: int
    superseded: int
    versions: tuple[Answers, ...]

    @property
    def mixed(self) -> bool:
        """True if answers of two versions of one model are in the files."""
        return is_mixture(self.versions)

    @property
    def holds(self) -> bool:
        """True if each sample of the data set is in the files once, for any reader of Parquet."""
        faults = self.missing, self.twice, self.foreign, self.broken, self.superseded
        return not any(faults)

    def __str__(self) -> str:
        more = f", {self.foreign:,} foreign" if self.foreign else ""
        more += f", {self.broken:,} files that can't be read" if self.broken else ""
        if self.superseded:
            more += f", {self.superseded:,} superseded (chatjobs results compact removes them)"
        times = f" with {self.samples:,} samples each" if self.samples > 1 else ""
        choices = f" with {self.choices:,} choices" if self.choices != self.rows else ""
        return (
            f"{self.rows_in:,} in{times}, {self.rows:,} rows{choices}, {self.missing:,} missing, "
            f"{self.twice:,} twice, {self.failed:,} failed{more}"
        )

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "versions": [one.to_dict() for one in self.versions]}


def audit(results: Results, run: str, rows_in: int, samples: int = 1) -> Audit:
    """Read all files of a run. Memory: a few bits a row, and the numbers of those that occur
    twice."""
    number_of = WrittenRows(results, run, samples).number_of
    expected = rows_in * samples
    choices: dict[int, RowSet] = {}  # the samples of each choice_index
    failed = RowSet()
    again: set[int] = set()
    foreign = current = 0  # rows
    broken = set(results.broken(run))
    whole = [file for file in results.files(run) if file not in broken]
    for file in whole:
        for row, repeat, choice, status in read_columns(file, COLUMNS):
            current += 1
            number = number_of(row, repeat)
            if number is None or number >= expected:
                foreign += 1
                continue
            if not choices.setdefault(choice, RowSet()).add(number):
                again.add(number)
            if status != "ok":
                failed.add(number)
    superseded = sum(_rows_in(file, broken) for file in results.superseded(run))
    twice = 0
    if again:
        twice, newest = _count_twice(results, run, number_of, again, failed)
        superseded += current - newest
    rows = len(choices.get(0, ()))
    return Audit(
        rows_in=rows_in,
        samples=samples,
        rows=rows,
        missing=expected - rows,
        twice=twice,
        failed=len(failed),
        foreign=foreign,
        broken=len(broken),
        choices=sum(map(len, choices.values())),
        superseded=superseded,
        versions=read_answers(dataset_of(whole)),
    )


def _rows_in(file: Path, broken: set[Path]) -> int:
    """The rows of a file; 0 for one that can't be read, which is added to `broken`."""
    try:
        rows: int = pq.read_metadata(file).num_rows
    except (pa.ArrowException, OSError):
        broken.add(file)
        return 0
    return rows


def _count_twice(
    results: Results,
    run: str,
    number_of: Callable[[int, int], int | None],
    again: set[int],
    failed: RowSet,
) -> tuple[int, int]:
    """Count the samples that the readers of `Results` see twice, and all rows that they see: they
    drop older attempts at a job. Corrects `failed`."""
    keys: Counter[tuple[int, int]] = Counter()
    rows = 0
    for number in again:
        failed.discard(number)
    for batch in results.dataset(run).to_batches(columns=list(COLUMNS)):
        rows += batch.num_rows
        values = zip(*(batch.column(name).to_pylist() for name in COLUMNS), strict=True)
        for row, repeat, choice, status in values:
            found = number_of(row, repeat)
            if found is None or found not in again:
                continue
            keys[found, choice] += 1
            if status != "ok":
                failed.add(found)
    return len({number for (number, _), count in keys.items() if count > 1}), rows
