"""Takes rows out of a run, such as those that failed, so that its producer enqueues them again."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from jobs.keys import bulk_queue
from jobs.results.compact import remove_rows
from jobs.results.files import Results
from jobs.runs.row_set import RowSet
from jobs.runs.written_rows import WrittenRows, read_columns
from jobs.store.run_rows import RowJob, RunRows

COLUMNS = ("row_index", "repeat_index", "job_id", "model")
FORGET_ROWS = 500  # in one round trip

Redo = Callable[[WrittenRows], RowSet]  # the samples to run again, of those in the files


def failed(written: WrittenRows) -> RowSet:
    """The samples that have failed or were cancelled."""
    return written.failed


def remove_chosen(results: Results, rows: RunRows, written: WrittenRows, chosen: RowSet) -> None:
    """Remove samples from the files, and their jobs and reservations from Redis. Call it with the
    lease on the run, after `written.refresh`.

    If it is interrupted, call it again: a row is in a file, or its producer enqueues it. Raises
    LeaseLost, redis.RedisError, pyarrow.ArrowException and OSError.
    """

    def is_chosen(row: int, repeat: int) -> bool:
        return written.number_of(row, repeat) in chosen

    jobs = (
        RowJob(row, repeat, job_id, bulk_queue(model))
        for file in results.files(rows.run)
        for row, repeat, job_id, model in read_columns(file, COLUMNS)
        if is_chosen(row, repeat)
    )
    while chunk := list(islice(jobs, FORGET_ROWS)):
        rows.forget(chunk)
    remove_rows(results, rows.run, is_chosen)
    written.clear()
