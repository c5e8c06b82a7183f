"""The span `record` of rows: from the end of their job until their file is complete.

Another process than the worker of a job may write its rows, so the parent is the span that the
request names; rows whose request names none have no span.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable

from jobs.results.rows import Row
from jobs.tracing import HEADERS, Tracing


def rows_written(tracing: Tracing, rows: Iterable[Row]) -> None:
    """A file with these rows is complete."""
    now = time.time()
    seen: set[str] = set()  # jobs: one has a row for each choice
    for row in rows:
        metadata, job, ended = row.get("metadata"), row["job_id"], row.get("finished_at")
        if not metadata or HEADERS[0] not in metadata or job in seen or ended is None:
            continue
        seen.add(job)
        caller = tracing.caller(json.loads(metadata))
        if tracing.knows(caller):
            attributes = {"chatjobs.job.id": job, "chatjobs.run": row["run_id"]}
            tracing.span("record", ended.timestamp(), now, caller, attributes)
