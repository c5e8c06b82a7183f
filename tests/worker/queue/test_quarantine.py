"""Who runs the jobs that may have killed their workers, and what runs meanwhile."""

from __future__ import annotations

from jobs import keys
from jobs.client.job import Job
from tests.worker.fake_backend import FakeBackend, text_of
from tests.worker.site import Site, wait_until

QUEUE = "rq:queue:chat:fake"


def suspect(site: Site, group: str, prompt: str) -> Job:
    """A job in quarantine, as after two deaths."""
    job = site.submit(prompt)
    site.redis.lrem(QUEUE, 1, job.id)
    site.redis.hset(f"rq:job:{job.id}", mapping={"chatjobs_group": group, "chatjobs_lost": 2})
    site.redis.rpush(keys.quarantine("chat:fake"), job.id)
    return job


def test_an_idle_worker_runs_each_group_apart(site: Site) -> None:
    class Together(FakeBackend):
        """Notes which jobs are in the batch when one starts."""

        def submit(self, operation, request, sink):
            with self._lock:
                inside = {
                    str(handle.request.job.id)
                    for handle in self._handles
                    if handle.sent < handle.count  # else it has ended and is about to be removed
                }
            met.update({frozenset((one, str(request.job.id))) for one in inside})
            return super().submit(operation, request, sink)

    met: set[frozenset[str]] = set()
    first = [suspect(site, "g1", f"a{i}") for i in range(3)]
    second = [suspect(site, "g2", f"b{i}") for i in range(2)]
    others = site.submit_many([f"q{i}" for i in range(4)])
    site.burst(Together())
    for job in first + second + others:
        assert job.result(timeout=1).text == text_of(job.request)
    groups = [{job.id for job in group} for group in (first, second, others)]
    assert all(any(pair <= group for group in groups) for pair in met), met
    assert not site.redis.exists(keys.quarantine("chat:fake"))
    site.assert_settled(first + second + others)


def test_suspects_do_not_wait_for_ever_if_all_workers_are_busy(site: Site) -> None:
    """One worker claims nothing more until it is idle, then runs them, then goes on."""
    jobs = site.submit_many([f"q{i}" for i in range(300)], words=60)
    site.worker(delay=0.01, max_batch=2)
    wait_until(lambda: jobs[1].status().over)
    accused = suspect(site, "g", "accused")
    wait_until(lambda: accused.status().over)
    assert site.redis.llen(QUEUE) > 0, "it waited until the queue was empty"
    assert accused.status().value == "finished"
    before = site.redis.llen(QUEUE)
    wait_until(lambda: site.redis.llen(QUEUE) < before)


def test_a_cancelled_suspect_does_not_run(site: Site) -> None:
    job = suspect(site, "g", "accused")
    assert job.cancel()
    backend = site.burst()
    assert backend.begun == []
    assert job.status().value == "cancelled"
