"""The memory that Redis needs for a job that has ended."""

from __future__ import annotations

from typing import Any

from jobs import keys
from jobs.client.job import Job
from tests.worker.site import Site

MAX_BYTES = 2500  # per ended job, with all that Redis needs for its keys
MAX_LOG_BYTES, MAX_LOG_SECONDS = 1100, 600  # of the token stream of an interactive job
COUNT = 1000


def memory_of(site: Site, pattern: str) -> int:
    names = list(site.redis.scan_iter(pattern, count=1000))
    return sum(site.redis.memory_usage(name, samples=0) or 0 for name in names)


def used(site: Site) -> int:
    return int(site.redis.info("memory")["used_memory"])


def test_an_ended_bulk_job_keeps_few_bytes(site: Site) -> None:
    submit_and_run(site, 20, priority="bulk")  # what a server allocates once
    site.redis.flushall()
    before = used(site)
    jobs = submit_and_run(site, COUNT, priority="bulk")
    assert (used(site) - before) / COUNT < MAX_BYTES
    assert not any(site.redis.exists(keys.log(job.id)) for job in jobs)


def test_an_ended_interactive_job_keeps_few_bytes_beside_its_log(site: Site) -> None:
    jobs = submit_and_run(site, 100, priority="interactive")
    logs = memory_of(site, keys.log("*").replace("{*}", "*"))
    assert 0 < logs / len(jobs) < MAX_LOG_BYTES
    assert all(0 < int(site.redis.ttl(keys.log(job.id))) <= MAX_LOG_SECONDS for job in jobs)
    assert (memory_of(site, "*") - logs) / len(jobs) < MAX_BYTES


def submit_and_run(site: Site, count: int, **fields: Any) -> list[Job]:
    questions = [f"What is {number} + {number}?" for number in range(count)]
    jobs = site.submit_many(questions, run="r", words=20, **fields)
    site.burst()
    assert all(job.status() == "finished" for job in jobs)
    return jobs
