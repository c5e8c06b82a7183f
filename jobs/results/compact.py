"""Replaces files of a run: all by one file, or each by one without some of its rows. Callers hold
the lease on the run.

A file without some of its rows gets the name of the file that it replaces, in one step for all
readers. It is there even if it has no rows: a recorder that was frozen does not write a part whose
file exists.

Several files can't be replaced by one in a single step: whoever lists the folder meanwhile sees
rows twice, or not at all. So: a note says which files the new one replaces, then the new file is
renamed into place, then the old ones are removed. `Results` ignores replaced files as soon as the
new one is there, and so reads each row once at any moment. Plain readers of Parquet see rows twice
between the rename and the removals, and if a recorder that was frozen writes a replaced part again,
until `finish_replacement` removes it.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.errors import invalid
from jobs.results.files import (
    SAMPLES,
    Results,
    dataset_of,
    write_tables,
)
from jobs.results.schema import SCHEMA
from jobs.results.superseded import NOTE, read_note
from jobs.results.unfinished import TEMPORARY, unfinished, write_text

KEY = ("row_index", "repeat_index")
KIND = "replacement"  # of unfinished files
GROUP_ROWS = 50_000  # rows of a row group
GROUP_BYTES = 64 * 2**20  # and bytes in memory


def compact(results: Results, run: str, confirm: Callable[[], None] = lambda: None) -> int:
    """Write the rows of an ended run to one file, without those of older attempts. Returns how many
    files it replaces; 0 if there is nothing to do.

    `confirm`: called when all is written, before a reader sees it; raises if the lease was lost. If
    it is interrupted, call it again. Raises InvalidRequest if a file can't be read.
    """
    broken = results.broken(run)
    if broken:
        raise invalid(f"{min(broken)} can't be read: remove or restore it first", "run")
    finish_replacement(results, run)
    files, rows = results.files(run), results.dataset(run)
    in_files = sum(pq.read_metadata(file).num_rows for file in files)
    if len(files) < 2 and rows.count_rows() == in_files:
        return 0

    def confirmed() -> Iterator[pa.RecordBatch]:
        yield from rows.to_batches()
        confirm()

    _replace_all(results, run, [file.name for file in files], confirmed())
    return len(files)


def finish_replacement(results: Results, run: str) -> None:
    """Remove files that were replaced: those that a killed call of `compact` has left, or that a
    recorder that was frozen has written again. Raises OSError."""
    left = results.superseded(run)
    if left and not results.broken(run):  # a new file that is damaged replaces nothing
        for file in left:
            file.unlink(missing_ok=True)


def remove_rows(results: Results, run: str, is_removed: Callable[[int, int], bool]) -> int:
    """Remove rows from the files of a run, by their row_index and repeat_index. Files without such
    rows stay as they are. Returns how many files were replaced.

    If it is interrupted, call it again. Raises pyarrow.ArrowException and OSError.
    """
    affected = [file for file in results.files(run) if any(_removed(file, is_removed))]
    for file in affected:
        _replace(results.path(run) / TEMPORARY, file, _kept(file, is_removed))
    return len(affected)


def _removed(file: Path, is_removed: Callable[[int, int], bool]) -> Iterator[bool]:
    for batch in dataset_of([file]).to_batches(columns=[*KEY]):
        yield from map(is_removed, *(batch.column(name).to_pylist() for name in KEY))


def _kept(file: Path, is_removed: Callable[[int, int], bool]) -> Iterator[pa.RecordBatch]:
    for batch in dataset_of([file]).to_batches():
        keys = zip(*(batch.column(name).to_pylist() for name in KEY), strict=True)
        yield batch.filter(pa.array([not is_removed(*key) for key in keys], pa.bool_()))


def _replace(folder: Path, file: Path, batches: Iterable[pa.RecordBatch]) -> None:
    """Write batches in place of a file. `folder`: of temporary files."""
    with unfinished(folder, KIND) as temporary:
        write_tables(temporary, file, _tables(batches))


def _replace_all(
    results: Results, run: str, names: Sequence[str], batches: Iterable[pa.RecordBatch]
) -> None:
    """Write one file in place of those of these names, which are all of the run."""
    folder = results.path(run)
    new = folder / SAMPLES / f"part-compacted-{uuid.uuid4().hex}.parquet"
    note = {name: old for name, old in read_note(folder).items() if name in names}
    # Also the files that were replaced before: a recorder that was frozen may write one again.
    old = sorted({*names}.union(*note.values()))
    write_text(folder, NOTE, json.dumps({**note, new.name: old}, indent=1))
    _replace(folder / TEMPORARY, new, batches)
    finish_replacement(results, run)


def _tables(source: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    batches: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in source:
        batches.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if rows >= GROUP_ROWS or size >= GROUP_BYTES:
            yield pa.Table.from_batches(batches, SCHEMA)
            batches, rows, size = [], 0, 0
    if rows:
        yield pa.Table.from_batches(batches, SCHEMA)
