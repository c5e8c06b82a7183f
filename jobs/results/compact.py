"""Replaces files of a run: by one file of all rows, or by one without some rows.

Several files can't be replaced by one in a single step: whoever lists the folder meanwhile sees
rows twice, or not at all. So: a note says which files the new one replaces, then the new file is
renamed into place, then the old ones are removed. `Results` ignores replaced files as soon as the
new one is there, and so reads each row once at any moment. Plain readers of Parquet see rows twice
between the rename and the removals.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pyarrow as pa

from jobs.errors import invalid
from jobs.results.files import (
    SAMPLES,
    TEMPORARY,
    Results,
    dataset_of,
    write_tables,
    write_text,
)
from jobs.results.schema import SCHEMA
from jobs.results.superseded import NOTE, read_note
from jobs.results.unfinished import unfinished

KEY = ("row_index", "repeat_index")
KIND = "compacted"  # of unfinished files
GROUP_ROWS = 50_000  # rows of a row group
GROUP_BYTES = 64 * 2**20  # and bytes in memory


def compact(results: Results, run: str) -> int:
    """Write the rows of an ended run to one file, without those of older attempts. Returns how many
    files it replaces; 0 if there is nothing to do.

    If it is interrupted, call it again. Raises InvalidRequest if a file can't be read.
    """
    folder = results.path(run)
    broken = results.broken(run)
    if broken:
        raise invalid(f"{min(broken)} can't be read: remove or restore it first", "run")
    files = results.files(run)
    current = {file.name for file in files}
    note = {new: old for new, old in read_note(folder).items() if new in current}
    _remove(results, run, note)  # what an interrupted call left
    if len(files) < 2:
        return 0
    _replace(results, run, current, note, results.dataset(run).to_batches())
    return len(files)


def remove_rows(results: Results, run: str, is_removed: Callable[[int, int], bool]) -> int:
    """Remove rows from the files of a run, by their row_index and repeat_index. Files without such
    rows stay as they are. Returns how many files were replaced.

    If it is interrupted, call it again. Raises pyarrow.ArrowException and OSError.
    """
    folder = results.path(run)
    files = results.files(run)
    current = {file.name for file in files}
    note = {new: old for new, old in read_note(folder).items() if new in current}
    _remove(results, run, note)
    affected = [file for file in files if any(_removed(file, is_removed))]
    if not affected:
        return 0

    def kept() -> Iterator[pa.RecordBatch]:
        for batch in dataset_of(affected).to_batches():
            keys = zip(*(batch.column(name).to_pylist() for name in KEY), strict=True)
            mask = [not is_removed(*key) for key in keys]
            yield batch.filter(pa.array(mask, pa.bool_()))

    _replace(results, run, {file.name for file in affected}, note, kept())
    return len(affected)


def _removed(file: Path, is_removed: Callable[[int, int], bool]) -> Iterator[bool]:
    for batch in dataset_of([file]).to_batches(columns=[*KEY]):
        yield from map(is_removed, *(batch.column(name).to_pylist() for name in KEY))


def _replace(
    results: Results,
    run: str,
    names: set[str],
    note: dict[str, list[str]],
    batches: Iterable[pa.RecordBatch],
) -> None:
    """Write one file in place of those of these names."""
    folder = results.path(run)
    name = f"part-compacted-{uuid.uuid4().hex}.parquet"
    # Also the files that were replaced before: a recorder that was frozen may write one again.
    replaced = [note.get(one, []) for one in names]
    old = sorted(names.union(*replaced))
    write_text(folder, NOTE, json.dumps({**note, name: old}, indent=1))
    with unfinished(folder / TEMPORARY, KIND) as temporary:
        write_tables(temporary, folder / SAMPLES / name, _tables(batches))
    _remove(results, run, {name: old})


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


def _remove(results: Results, run: str, note: dict[str, list[str]]) -> None:
    for old in {name for names in note.values() for name in names}:
        (results.path(run) / SAMPLES / old).unlink(missing_ok=True)
