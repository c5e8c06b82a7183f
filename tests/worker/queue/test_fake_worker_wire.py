"""`jobs.testing` writes to Redis as a real worker does."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from jobs import JobError, keys
from jobs.client.job import Job
from jobs.operations import rows_of
from jobs.results import outbox
from jobs.store.claimed_job import ClaimedJob
from jobs.stream.delta import Delta
from jobs.testing.attempts import Attempts
from tests.worker.fake_backend import text_of
from tests.worker.site import Site

# What only a real worker has: its engine, and values that differ between any two jobs.
ROW_DIFFERS = {
    "job_id", "row_index", "request_hash", "metadata", "worker_id", "host", "sampling_extra",
    "prompt_token_ids", "output_token_ids", "seed", "temperature", "dtype", "device_name", "engine",
}  # fmt: skip
TIMES = ("_at", "_s", "_hash", "_version", "_revision", "_fingerprint")


def wire_of(site: Site, job: Job) -> dict[str, Any]:
    """All keys of a job, with what does not depend on the time or the worker's name."""
    found: dict[str, Any] = {}
    for name in sorted(site.redis.scan_iter(f"*{job.id}*")):
        found[name.decode().replace(job.id, "ID")] = -(-site.redis.ttl(name) // 60)
    fields = site.hash(job)
    found["hash"] = set(fields)
    found["status"] = fields["status"], fields["chatjobs_attempt"], fields.get("chatjobs_error")
    registries = [name for name in site.redis.scan_iter("rq:*:chat:fake") if b"queue" not in name]
    found["registry"] = [
        name for name in sorted(registries) if site.redis.zscore(name, job.id) is not None
    ]
    ((_, result),) = site.redis.xrange(f"rq:results:{job.id}")
    found["result"] = sorted(result), result[b"type"]
    log = [
        (entry, json.loads(fields[b"d"])) for entry, fields in site.redis.xrange(keys.log(job.id))
    ]
    found["text"] = "".join(d["c"] for _, data in log for d in data.get("p", ()))
    found["first"], found["end"] = log[0][0], log[-1]
    return found


def finish(attempts: Attempts, attempt: ClaimedJob, real: Job) -> None:
    attempts.finish(attempt, real.result(timeout=1))


def fail(attempts: Attempts, attempt: ClaimedJob, real: Job) -> None:
    with pytest.raises(JobError) as caught:
        real.result(timeout=1)
    attempts.fail(attempt, caught.value)


@pytest.mark.parametrize(
    ("options", "words", "end"),
    [({}, 2, finish), ({"fail": "out_of_memory", "retries": 0}, 1, fail)],
    ids=["finished", "failed"],
)
def test_the_keys_of_a_job_are_those_of_a_real_worker(
    site: Site, options: dict[str, Any], words: int, end: Callable[..., None]
) -> None:
    real = site.submit("hello", words=2, **options)
    site.burst()
    imitated = site.submit("hello", words=2, **options)
    attempts = Attempts(site.redis)
    (attempt,) = attempts.claim()
    text = "".join(f"{word} " for word in text_of(real.request).split()[:words])
    attempts.write(attempt, 1, [Delta(0, text)])
    end(attempts, attempt, real)
    assert wire_of(site, imitated) == wire_of(site, real)
    ((_, entry),) = site.redis.xrange(keys.outbox("default"))
    (row,) = rows_of(outbox.decode(entry[b"row"]))
    recorded = site.row(real)
    assert set(row) <= set(recorded)
    same = [name for name in row if name not in ROW_DIFFERS and not name.endswith(TIMES)]
    if end is finish:
        assert {name: row[name] for name in same if recorded[name] != row[name]} == {}
