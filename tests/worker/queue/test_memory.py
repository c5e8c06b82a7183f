"""The memory that Redis needs for a job that has ended."""

from __future__ import annotations

import pytest

from jobs import keys
from tests.worker.site import Site

MAX_BYTES = 2500  # per ended job
MAX_LOG_BYTES, MAX_LOG_SECONDS = 700, 600  # of its token stream
COUNT = 100


def memory_of(site: Site, pattern: str) -> int:
    names = list(site.redis.scan_iter(pattern, count=1000))
    return sum(site.redis.memory_usage(name, samples=0) or 0 for name in names)


@pytest.mark.parametrize("priority", ["interactive", "bulk"])
def test_an_ended_job_keeps_few_bytes(site: Site, priority: str) -> None:
    questions = [f"What is {number} + {number}?" for number in range(COUNT)]
    jobs = site.submit_many(questions, run="r", priority=priority, words=20)
    site.burst()
    assert all(job.status() == "finished" for job in jobs)
    logs = memory_of(site, keys.log("*").replace("{*}", "*"))
    assert 0 < logs / COUNT < MAX_LOG_BYTES
    assert all(0 < int(site.redis.ttl(keys.log(job.id))) <= MAX_LOG_SECONDS for job in jobs)
    assert (memory_of(site, "*") - logs) / COUNT < MAX_BYTES
