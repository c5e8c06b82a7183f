"""Workers of different room and speed serve one queue."""

from __future__ import annotations

from collections import Counter

from jobs.store.worker_status import read_workers
from tests.worker.site import PATIENCE, Site, wait_until


def test_each_job_runs_once_and_the_larger_and_faster_worker_takes_more(site: Site) -> None:
    small = site.worker(max_batch=1, delay=1.0)
    large = site.worker(max_batch=16)
    site.wait_for_workers(2)
    names = {one["pid"]: one["name"] for one in read_workers(site.redis)}
    jobs = site.submit_many([str(number) for number in range(60)])
    site.client.gather(jobs, timeout=PATIENCE)
    site.client.wait_for_rows(jobs, timeout=PATIENCE)
    wait_until(lambda: len(site.rows()) == len(jobs))
    site.assert_settled(jobs)
    taken = Counter(row["worker_id"] for row in site.rows())
    assert taken[names[large.pid]] > taken[names[small.pid]]
    assert taken.total() == len(jobs) and set(taken) <= set(names.values())
