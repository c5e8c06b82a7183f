"""Drops rows that a later attempt at the same job has replaced.

The recorder writes rows for a job again only if Redis forgot that the job had ended (it lost data
that was acknowledged), or if the job was requeued after its end.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

KEY = ("row_index", "repeat_index")  # integers, and so cheaper to compare than job_id
ATTEMPT = ("job_id", "attempt", "finished_at")  # of one job, the greatest is the newest
UNKNOWN = 0  # a time for sorting, of a job without one


def latest_attempts(rows: ds.Dataset) -> ds.Dataset:
    """The rows of the newest attempt at each job, lazily. Reads the columns of KEY, and more of
    them only if a key occurs twice."""
    first_choices = rows.to_table([*KEY], filter=pc.field("choice_index") == 0)
    counts = first_choices.group_by([*KEY]).aggregate([([], "count_all")])
    if len(counts) == len(first_choices):
        return rows
    twice = counts.filter(pc.field("count_all") > 1)["row_index"].unique()
    attempts = rows.to_table([*ATTEMPT], filter=pc.field("row_index").isin(twice))
    moment = pc.coalesce(attempts["finished_at"].cast(pa.int64()), pa.scalar(UNKNOWN, pa.int64()))
    attempts = attempts.set_column(2, "finished_at", moment).group_by([*ATTEMPT]).aggregate([])
    attempts = attempts.sort_by([(name, "ascending") for name in ATTEMPT])
    job = attempts["job_id"]
    is_last = [*pc.not_equal(job[:-1], job[1:]).to_pylist(), True]
    older = attempts.filter(pa.array([not last for last in is_last]))
    if not older.num_rows:
        return rows  # different jobs with one row_index
    replaced = pc.binary_join_element_wise(
        *(older[name].cast(pa.string()) for name in ATTEMPT), ":"
    )
    return rows.filter(~_identity().isin(replaced.combine_chunks()))


def _identity() -> pc.Expression:
    """The attempt of a row, as text."""
    moment = pc.coalesce(pc.field("finished_at").cast(pa.int64()), pc.scalar(UNKNOWN))
    values = (pc.field("job_id"), pc.field("attempt"), moment)
    return pc.binary_join_element_wise(*(one.cast(pa.string()) for one in values), pc.scalar(":"))
