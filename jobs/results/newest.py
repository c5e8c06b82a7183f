"""One row per key: drops rows of a run that a later attempt at the same job has replaced.

The recorder writes a second row for a key only if Redis forgot that the job had ended (it lost data
that was acknowledged), or if the job was requeued after its end.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

KEY = "row_index"
ATTEMPT = ("attempt", "finished_at", "job_id")  # in this order: the greatest is the newest
UNKNOWN = 0  # a time for sorting, of a job without one


def newest_attempts(rows: ds.Dataset) -> ds.Dataset:
    """The rows of the newest attempt of each row_index, lazily. Reads few columns, and more of them
    only if a key occurs twice."""
    first_choices = rows.to_table([KEY], filter=pc.field("choice_index") == 0)[KEY]
    if pc.count_distinct(first_choices).as_py() == len(first_choices):
        return rows
    counts = first_choices.value_counts()
    repeated = counts.field("values").filter(pc.greater(counts.field("counts"), 1))
    attempts = rows.to_table([KEY, *ATTEMPT], filter=pc.field(KEY).isin(repeated))
    moment = pc.coalesce(attempts["finished_at"].cast(pa.int64()), pa.scalar(UNKNOWN, pa.int64()))
    attempts = attempts.set_column(2, "finished_at", moment).group_by([KEY, *ATTEMPT]).aggregate([])
    attempts = attempts.sort_by([(name, "ascending") for name in (KEY, *ATTEMPT)])
    index = attempts[KEY]
    is_last = [*pc.not_equal(index[:-1], index[1:]).to_pylist(), True]
    older = attempts.filter(pa.array([not last for last in is_last]))
    replaced = pc.binary_join_element_wise(
        *(older[name].cast(pa.string()) for name in (KEY, *ATTEMPT)), ":"
    )
    return rows.filter(~_identity().isin(replaced.combine_chunks()))


def _identity() -> pc.Expression:
    """The attempt of a row, as text."""
    moment = pc.coalesce(pc.field("finished_at").cast(pa.int64()), pc.scalar(UNKNOWN))
    values = (pc.field(KEY), pc.field("attempt"), moment, pc.field("job_id"))
    return pc.binary_join_element_wise(*(one.cast(pa.string()) for one in values), pc.scalar(":"))
