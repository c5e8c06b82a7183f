"""The end of a worker: announced, forced, or because it hangs."""

from __future__ import annotations

import signal
import time

from jobs import keys
from jobs.client.client import Job
from tests.worker.site import Site, WorkerProcess, wait_until
from worker.queue.lease_keeper import EXIT_HUNG
from worker.service import GRACE_SECONDS
from worker.signals import EXIT_ABORTED

KUBERNETES_SECONDS = 30.0  # from SIGTERM to SIGKILL, by default


def lost(site: Site, jobs: list[Job]) -> set[str | None]:
    return {site.hash(job).get("chatjobs_lost") for job in jobs}


def start(site: Site, jobs: list[Job], **options: object) -> WorkerProcess:
    worker = site.worker(**options)
    wait_until(lambda: all(generates(site, job) for job in jobs))
    return worker


def generates(site: Site, job: Job) -> bool:
    """Whether a job's present attempt has published a token. A job that is only claimed goes back
    without an announcement when the worker stops."""
    if job.status().value != "started":
        return False
    attempt = site.hash(job).get("chatjobs_attempt", "")
    newest = site.redis.xrevrange(keys.log(job.id), count=1)
    return any(entry.startswith(f"{attempt}-".encode()) for entry, _ in newest)


def test_a_deploy_makes_no_suspects(site: Site) -> None:
    """SIGTERM, and SIGKILL before the grace period has ended."""
    assert GRACE_SECONDS < KUBERNETES_SECONDS
    jobs = site.submit_many(["a", "b", "c"], words=100_000)
    for _ in range(3):
        worker = start(site, jobs, delay=0.02, grace=3600.0)
        worker.send(signal.SIGTERM)
        wait_until(lambda: site.redis.scard(keys.STOPPING), "the end is not announced")
        worker.kill()
        other = site.worker(models=["other"])
        wait_until(lambda: site.redis.llen("rq:queue:chat:fake") == 3)
        assert lost(site, jobs) == {None}
        other.kill()


def test_a_second_signal_ends_a_worker_that_starts_a_job(site: Site) -> None:
    job = site.submit(slow=3600)
    worker = site.worker(grace=3600.0)
    wait_until(lambda: "a slow start" in worker.output)
    worker.send(signal.SIGTERM)
    time.sleep(0.5)
    assert worker.alive
    worker.send(signal.SIGTERM)
    assert worker.wait() == EXIT_ABORTED
    site.worker(models=["other"])
    wait_until(lambda: job.status().value == "queued")
    assert lost(site, [job]) == {None}


def test_a_second_signal_ends_a_worker_that_waits_for_redis(site: Site) -> None:
    job = site.submit(words=100_000)
    worker = start(site, [job], grace=3600.0)
    with site.paused_server():
        time.sleep(1.0)
        worker.send(signal.SIGTERM)
        time.sleep(0.5)
        worker.send(signal.SIGTERM)
        assert worker.wait() in (0, EXIT_ABORTED)


def test_a_slow_start_does_not_lose_the_lease(site: Site) -> None:
    first = site.submit("first", words=100_000)
    worker = start(site, [first])
    slow = site.submit("slow", slow=4)  # longer than the lease
    wait_until(lambda: slow.status().value == "started")
    site.worker(models=["other"])  # would return the jobs
    wait_until(lambda: slow.status().over)
    first.cancel()
    wait_until(lambda: first.status().over)
    assert worker.stop() == 0
    assert site.hash(first)["chatjobs_attempt"] == site.hash(slow)["chatjobs_attempt"] == "1"
    assert "lost the lease" not in worker.output


def test_a_worker_whose_loop_hangs_ends(site: Site) -> None:
    job = site.submit(slow=3600)
    worker = site.worker(hang_seconds=1.0)
    assert worker.wait() == EXIT_HUNG
    assert "the worker's loop made no progress for 1 s" in worker.output
    assert "fake_backend.py" in worker.output  # the stack of the loop
    assert job.status().value == "started"


def test_a_worker_in_which_foreign_code_blocks_python_ends(site: Site) -> None:
    site.submit(block=3600)
    worker = site.worker(hang_seconds=0.5)
    assert worker.wait() == 1
    assert "Timeout (0:00:01)!" in worker.output
    assert "fake_backend.py" in worker.output


def test_a_worker_that_stops_ends_soon_if_foreign_code_blocks_python(site: Site) -> None:
    """Python receives no further signal then."""
    job = site.submit(words=100_000, block_cancel=3600)
    worker = start(site, [job], grace=3600.0, hang_seconds=30.0)
    worker.send(signal.SIGTERM)
    wait_until(lambda: site.redis.scard(keys.STOPPING), "the end is not announced")
    job.cancel()
    assert worker.wait() == 1
    assert "Timeout (0:00:05)!" in worker.output
    assert "fake_backend.py" in worker.output
    site.worker(models=["other"])
    wait_until(lambda: job.status().value != "started")
    assert lost(site, [job]) == {None}
