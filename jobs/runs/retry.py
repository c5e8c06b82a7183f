"""Takes the failed rows out of a run, so that its producer enqueues them again."""

from __future__ import annotations

from itertools import islice

from jobs.keys import bulk_queue
from jobs.results.compact import remove_rows
from jobs.results.files import Results
from jobs.runs.written_rows import WrittenRows, read_columns
from jobs.store.run_rows import RowJob, RunRows

COLUMNS = ("row_index", "repeat_index", "job_id", "model")
FORGET_ROWS = 500  # in one round trip


def remove_failed(results: Results, rows: RunRows, written: WrittenRows) -> int:
    """Remove the failed rows from the files, and their jobs and reservations from Redis. Returns
    how many they are. Call it with the lease on the run.

    If it is interrupted, call it again: a row is in a file, or its producer enqueues it. Raises
    LeaseLost, redis.RedisError, pyarrow.ArrowException and OSError.
    """
    written.clear()
    written.refresh()
    failed = written.failed
    if not len(failed):
        return 0

    def has_failed(row: int, repeat: int) -> bool:
        return written.number_of(row, repeat) in failed

    jobs = (
        RowJob(row, repeat, job_id, bulk_queue(model))
        for file in results.files(rows.run)
        for row, repeat, job_id, model in read_columns(file, COLUMNS)
        if has_failed(row, repeat)
    )
    while chunk := list(islice(jobs, FORGET_ROWS)):
        rows.forget(chunk)
    remove_rows(results, rows.run, has_failed)
    written.clear()
    return len(failed)
