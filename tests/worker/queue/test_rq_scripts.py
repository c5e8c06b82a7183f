"""claim.lua returns the fields of a job's hash in the order that Python reads them."""

from __future__ import annotations

import re

from worker.queue import rq_job, rq_scripts


def test_a_claim_returns_the_fields_that_a_worker_reads() -> None:
    (call,) = re.findall(r"'HMGET', job, (.*?)\)", rq_scripts.CLAIM, re.DOTALL)
    assert tuple(re.findall(r"'(\w+)'", call)) == rq_job.FIELDS
