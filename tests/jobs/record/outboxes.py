"""Shared by the tests of the recorder: rows in an outbox, and what became of them on disk."""

from __future__ import annotations

import pyarrow.parquet as pq

from jobs import keys
from jobs.record.recorder import Recorder
from jobs.results import outbox
from jobs.store.part_plans import Plan
from tests.worker.site import Site

RUN = "r1"


def fill(site: Site, count: int, first: int = 0, text: str = "hi", run: str = RUN) -> None:
    """Put rows into the outbox, as settled jobs do."""
    pipeline = site.redis.pipeline()
    for number in range(first, first + count):
        request = {
            "model": "fake",
            "messages": [{"role": "user", "content": text}],
            "job": {"run": run, "row": number},
        }
        entry = outbox.outbox_entry(f"job-{number}", request, "error", operation="chat", attempt=1)
        pipeline.xadd(keys.outbox(run), {outbox.FIELD: outbox.encode(entry)})
    pipeline.sadd(keys.OUTBOXES, run)
    pipeline.execute()


def plan_next(recorder: Recorder) -> Plan | None:
    """The plan of the next part of the run, if one is due."""
    plans = recorder._plan([RUN])
    return plans[0] if plans else None


def numbers(site: Site) -> list[int]:
    return sorted(row["row_index"] for row in site.rows(RUN))


def files(site: Site) -> dict[str, list[int]]:
    """Rows of each part, by file name."""
    found = (site.folder / RUN / "samples").glob("*")
    return {file.name: pq.read_table(file)["row_index"].to_pylist() for file in sorted(found)}
