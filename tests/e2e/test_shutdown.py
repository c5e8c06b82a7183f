"""The end of a worker: announced, forced, or because it hangs."""

from __future__ import annotations

import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from jobs import JobError, keys
from jobs.client.job import Job
from jobs.embedded import EmbeddedRedis
from jobs.record import last_rows
from jobs.record.last_rows import ROWS_SECONDS
from jobs.signals import EXIT_ABORTED
from tests.worker.site import PATIENCE, Site, WorkerProcess, wait_until
from worker.option_values import GRACE_SECONDS
from worker.queue.lease_keeper import EXIT_HUNG

KUBERNETES_SECONDS = 30.0  # from SIGTERM to SIGKILL, by default


def lost(site: Site, jobs: list[Job]) -> set[str | None]:
    return {site.hash(job).get("chatjobs_lost") for job in jobs}


def start(site: Site, jobs: list[Job], **options: object) -> WorkerProcess:
    worker = site.worker(**options)
    wait_until(lambda: all(generates(site, job) for job in jobs))
    return worker


def announced(site: Site, worker: WorkerProcess) -> bool:
    """True if this worker has announced its end: names of dead ones may still be there."""
    names = [name.decode() for name in site.redis.smembers(keys.STOPPING)]
    return any(f"-{worker.pid}-" in name for name in names)


def generates(site: Site, job: Job) -> bool:
    """True if a job's present attempt has published a token. A job that is only claimed goes back
    without an announcement when the worker stops."""
    if job.status().value != "started":
        return False
    attempt = site.hash(job).get("chatjobs_attempt", "")
    newest = site.redis.xrevrange(keys.log(job.id), count=1)
    return any(entry.startswith(f"{attempt}-".encode()) for entry, _ in newest)


def test_a_deploy_makes_no_suspects(site: Site) -> None:
    """SIGTERM, and SIGKILL before the grace period has ended."""
    assert GRACE_SECONDS + ROWS_SECONDS < KUBERNETES_SECONDS
    jobs = site.submit_many(["a", "b", "c"], words=100_000)
    worker = start(site, jobs, delay=0.02, grace=3600.0)
    worker.send(signal.SIGTERM)
    wait_until(partial(announced, site, worker), "the end is not announced")
    worker.kill()
    site.worker(models=["other"])
    wait_until(lambda: site.redis.llen("rq:queue:chat:fake") == 3)
    assert lost(site, jobs) == {None}


def test_a_second_signal_ends_a_worker_that_starts_a_job(site: Site) -> None:
    job = site.submit(slow=3600)
    worker = site.worker(grace=3600.0)
    wait_until(lambda: "a slow start" in worker.output)
    worker.send(signal.SIGTERM)
    wait_until(partial(announced, site, worker), "the end is not announced")
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
    worker = start(site, [first], lease_seconds=3.0)
    slow = site.submit("slow", slow=8)  # longer than the lease
    wait_until(lambda: slow.status().value == "started")
    site.worker(models=["other"], lease_seconds=3.0)  # would return the jobs
    wait_until(lambda: slow.status().over)
    first.cancel()
    wait_until(lambda: first.status().over)
    assert worker.stop() == 0
    assert site.hash(first)["chatjobs_attempt"] == site.hash(slow)["chatjobs_attempt"] == "1"
    assert "lost the lease" not in worker.output


def test_a_worker_whose_loop_hangs_ends(site: Site) -> None:
    job = site.submit(slow=3600)
    worker = site.worker(hang_seconds=4.0)
    assert worker.wait() == EXIT_HUNG
    assert "the worker's loop made no progress for 4 s" in worker.output
    assert "fake_backend.py" in worker.output  # the stack of the loop
    assert job.status().value == "started"


def test_a_worker_that_was_suspended_for_longer_than_a_hang_goes_on(site: Site) -> None:
    """The time in which its loop could not run is no hang, nor is what it did before."""
    slow = site.submit(slow=9)
    worker = site.worker(hang_seconds=6.0)
    wait_until(lambda: "a slow start" in worker.output)
    time.sleep(2.0)
    worker.freeze()
    time.sleep(5.0)  # 7 s without a round of the loop
    worker.thaw()
    wait_until(lambda: slow.status().over or not worker.alive)
    assert worker.alive, worker.output
    assert site.submit().result(timeout=PATIENCE).text
    assert worker.stop() == 0
    assert "made no progress" not in worker.output


def test_a_worker_in_which_foreign_code_blocks_python_ends(site: Site) -> None:
    site.submit(block=3600)
    worker = site.worker(hang_seconds=2.0)
    assert worker.wait() == 1
    assert "Timeout (0:00:04)!" in worker.output
    assert "fake_backend.py" in worker.output


def test_a_worker_that_stops_ends_soon_if_foreign_code_blocks_python(site: Site) -> None:
    """Python receives no further signal then."""
    job = site.submit(words=100_000, block_cancel=3600)
    worker = start(site, [job], grace=3600.0, hang_seconds=30.0)
    worker.send(signal.SIGTERM)
    wait_until(partial(announced, site, worker), "the end is not announced")
    job.cancel()
    assert worker.wait() == 1
    assert "Timeout (0:00:05)!" in worker.output
    assert "fake_backend.py" in worker.output
    site.worker(models=["other"])
    wait_until(lambda: job.status().value != "started")
    assert lost(site, [job]) == {None}


def test_a_worker_that_stops_leaves_the_rows_of_the_others_to_them(
    site: Site, tmp_path: Path
) -> None:
    """With an append-only file each file waits for its sync, and others end jobs meanwhile."""
    with EmbeddedRedis(tmp_path / "redis", append_only=True, port=0) as server:
        busy = Site(server.tcp_url, site.folder)
        try:
            long = {"lease_seconds": 60.0}  # neither finds the other one dead
            worker = busy.worker(**long)
            other = busy.worker(models=["other"], part_seconds=3600.0, **long)
            busy.submit("one").result(timeout=PATIENCE)
            busy.submit("two", model="other").result(timeout=PATIENCE)
            stopped = threading.Event()

            def go_on() -> None:
                while not stopped.is_set():  # there are always jobs to end
                    jobs = busy.submit_many(["more"] * 300, model="other")
                    jobs[50].result(timeout=PATIENCE)

            def stops() -> bool:
                """True if the other worker ended jobs after the last look for rows."""
                nonlocal worker
                assert worker.stop() == 0
                assert "ERROR" not in worker.output and "WARNING" not in worker.output
                if "which the other recorders write" in worker.output:
                    return True
                worker = busy.worker(**long)
                wait_until(lambda: "serves fake" in worker.output)
                return False

            producer = threading.Thread(target=go_on)
            producer.start()
            try:
                wait_until(stops, "a worker never leaves rows")
            finally:
                stopped.set()
                producer.join()
            wait_until(lambda: not busy.redis.exists(keys.OUTBOXES))
            assert other.stop() == 0
        finally:
            busy.close()


def test_a_worker_whose_rows_can_not_be_written_stops_and_says_so(site: Site) -> None:
    worker = site.worker(grace=3600.0, lease_seconds=30.0)
    wait_until(lambda: "serves fake" in worker.output)
    (site.folder / "default").write_text("in the way")
    site.submit("one").result(timeout=PATIENCE)
    assert worker.stop() == 0  # the row is in Redis
    assert "rows left in Redis until they can be written: 1 (" in worker.output
    assert str(site.folder / "default") in worker.output
    (site.folder / "default").unlink()
    site.burst()
    assert len(site.rows()) == 1


def test_a_burst_whose_rows_can_not_be_written_fails(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(last_rows, "FINISH_SECONDS", 5.0)
    site.folder.mkdir()
    (site.folder / "default").write_text("in the way")
    site.submit("one")
    with pytest.raises(JobError) as caught:
        site.burst()
    assert "all jobs have ended, but rows are not written: " in caught.value.message
    assert str(site.folder / "default") in caught.value.message
