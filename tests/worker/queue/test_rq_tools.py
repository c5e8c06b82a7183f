"""RQ's tools and stock workers beside a chatjobs worker: info, stop, cancel, suspend."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rq import Worker
from rq.command import send_shutdown_command, send_stop_job_command
from rq.job import cancel_job
from rq.registry import (
    CanceledJobRegistry,
)
from rq.serializers import JSONSerializer
from rq.suspension import resume, suspend

from jobs.client.job import Job
from jobs.operations import SCORE
from jobs.store.connection.protocol import run_sync
from jobs.store.requeue import requeue
from jobs.store.worker_status import read_workers
from tests.worker.fake_backend import text_of
from tests.worker.queue.rq_jobs import QUEUE, fetch
from tests.worker.site import PATIENCE, ROOT, Site, wait_until

RQ = Path(sys.executable).parent / "rq"


@pytest.fixture
def busy(site: Site) -> Iterator[tuple[Site, list[Job]]]:
    """A worker with eight long jobs."""
    jobs = site.submit_many([f"q{i}" for i in range(8)], words=10_000)
    site.worker(delay=0.01)
    wait_until(lambda: all(job.status().value == "started" for job in jobs))
    wait_until(lambda: Worker.all(connection=site.redis)[0].get_current_job_id())
    yield site, jobs


def rq(site: Site, *words: str) -> str:
    done = subprocess.run([RQ, *words, "-u", site.url], capture_output=True, text=True, check=True)
    return done.stdout


def test_rq_info_lists_the_worker_and_changes_nothing(busy: tuple[Site, list[Job]]) -> None:
    site, jobs = busy
    output = rq(site, "info", "--raw")
    assert f"queue {QUEUE} 0" in output
    assert " busy" in output
    assert "8 executing" in rq(site, "info")
    for job in jobs:
        assert fetch(site, job).is_started
        assert job.cancel()
    wait_until(lambda: all(job.status().over for job in jobs))
    assert {job.status().value for job in jobs} == {"cancelled"}
    assert "jobs: 0 finished, 0 failed" in rq(site, "info")
    assert len(CanceledJobRegistry(QUEUE, connection=site.redis).get_job_ids()) == 8


WITHOUT_CHATJOBS = "import sys; sys.modules['worker'] = None; from rq.cli import main; main()"
STOCK_WORKERS: dict[str, tuple[str, list[str]]] = {
    "json": ("queued", [str(RQ), "worker", "--serializer", "json"]),
    "pickle, the default": ("failed", [str(RQ), "worker"]),
    "json without chatjobs": (
        "failed",
        [sys.executable, "-c", WITHOUT_CHATJOBS, "worker", "--serializer", "json"],
    ),
}


@pytest.mark.parametrize("kind", STOCK_WORKERS)
def test_what_a_stock_worker_does_with_a_chat_job(site: Site, kind: str) -> None:
    """As docs/limits.md says. A failed job is repeated by `jobs requeue`."""
    status, command = STOCK_WORKERS[kind]
    job = site.submit()
    words = [*command, "-u", site.url, "--max-jobs", "1", QUEUE]
    done = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, check=True, timeout=PATIENCE
    )
    assert job.status() == status
    if status == "queued":
        assert "serve the jobs with chatjobs work --model fake" in done.stderr
    else:
        site.burst()
        assert site.row(job)["status"] == "error"
        assert run_sync(requeue(job.id), site.client.connection)
    site.burst()
    assert job.result(timeout=PATIENCE).text


def test_a_stock_worker_gives_a_scoring_job_back(site: Site) -> None:
    request: Any = {"model": "fake", "items": [{"type": "perplexity", "text": "a"}]}
    job = site.client.submit(request)
    words = [*STOCK_WORKERS["json"][1], "-u", site.url, "--max-jobs", "1", QUEUE]
    done = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, check=True, timeout=PATIENCE
    )
    assert "a stock RQ worker can't run scoring jobs" in done.stderr
    assert job.status() == "queued"
    assert site.redis.lrange(f"rq:queue:{QUEUE}", 0, -1) == [job.id.encode()]


def test_rq_sees_the_worker_busy_idle_and_gone(busy: tuple[Site, list[Job]]) -> None:
    site, jobs = busy
    (worker,) = Worker.all(connection=site.redis)
    assert worker.get_state() == "busy"
    assert worker.get_current_job_id() in {job.id for job in jobs}
    moved = [f"{queue} {SCORE.func}" for queue in ("chat:fake", "bulk:fake")]
    assert worker.queue_names() == ["chat:fake", moved[0], "bulk:fake", moved[1]]
    for job in jobs:
        job.cancel()
    wait_until(lambda: Worker.all(connection=site.redis)[0].get_state() == "idle")
    send_shutdown_command(site.redis, worker.name)
    wait_until(lambda: not Worker.all(connection=site.redis))


def test_rq_stops_one_of_eight_jobs(busy: tuple[Site, list[Job]]) -> None:
    site, jobs = busy
    send_stop_job_command(site.redis, jobs[3].id, serializer=JSONSerializer)
    wait_until(lambda: jobs[3].status().over)
    assert jobs[3].status().value == "cancelled"
    assert {job.status().value for job in jobs if job is not jobs[3]} == {"started"}


def test_a_job_cancelled_with_rq_is_dropped_without_a_result(busy: tuple[Site, list[Job]]) -> None:
    site, jobs = busy
    cancel_job(jobs[0].id, connection=site.redis, serializer=JSONSerializer)
    wait_until(lambda: [one["jobs"] for one in read_workers(site.redis)] == [7])
    assert fetch(site, jobs[0]).is_canceled
    assert fetch(site, jobs[0]).latest_result() is None


def test_a_suspended_worker_claims_nothing(site: Site) -> None:
    suspend(site.redis)
    site.worker()
    wait_until(lambda: Worker.all(connection=site.redis))
    job = site.submit()
    time.sleep(0.5)
    assert job.status().value == "queued"
    resume(site.redis)
    assert job.result(timeout=PATIENCE).text == text_of(job.request)
