"""Helper processes of a worker that are stopped: no job fails for it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.worker.site import PATIENCE, Site, WorkerProcess, wait_until

LONG_LEASE = {"lease_seconds": 60.0}  # none of the workers dies, however slow the machine is
RENDERER = "worker.prompt.renderer"
FIELDS = {"model": "demo", "max_tokens": 4, "ignore_eos": True, "retries": 0}


def renderers(worker: WorkerProcess) -> list[int]:
    """Process ids of a worker's helpers that render chat templates."""
    found = []
    for children in Path(f"/proc/{worker.pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread or its child has ended
            for pid in children.read_text().split():
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if RENDERER.encode() in words:
                    found.append(int(pid))
    return found


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@contextmanager
def all_stopped(worker: WorkerProcess) -> Iterator[None]:
    """Each renderer of a worker is stopped as soon as it exists."""
    over = threading.Event()

    def stop() -> None:
        while not over.wait(0.02):
            for pid in renderers(worker):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)

    thread = threading.Thread(target=stop)
    thread.start()
    try:
        wait_until(lambda: {state(pid) for pid in renderers(worker)} == {"T"})
        yield
    finally:
        over.set()
        thread.join()


def start(site: Site) -> WorkerProcess:
    worker = site.worker(real=True, models=["demo"], **LONG_LEASE)
    wait_until(lambda: " serves " in worker.output)
    return worker


def test_a_stopped_renderer_is_replaced_and_no_job_fails(site: Site) -> None:
    worker = start(site)
    (stopped,) = renderers(worker)
    os.kill(stopped, signal.SIGSTOP)
    jobs = site.submit_many(["a", "b", "c"], **FIELDS)
    assert [job.result(timeout=PATIENCE).usage.completion_tokens for job in jobs] == [4, 4, 4]
    assert stopped not in renderers(worker)
    assert f"renders chat templates ({stopped}) does not answer" in worker.output
    assert worker.stop() == 0
    assert {row["attempt"] for row in site.rows()} == {1}


def test_a_worker_whose_renderers_never_answer_leaves_its_jobs_to_others(site: Site) -> None:
    sick = start(site)
    with all_stopped(sick):
        job = site.submit("a", **FIELDS)
        wait_until(lambda: "does not answer" in sick.output)
        healthy = site.worker(models=["demo"], **LONG_LEASE)
        assert job.result(timeout=PATIENCE).text
    assert [sick.stop(), healthy.stop()] == [0, 0]
    (row,) = site.rows()
    assert f"-{healthy.pid}-" in row["worker_id"]
    assert {failure["message"] for failure in row["failures"]} == {
        "the process that renders chat templates does not answer: it did not work for 5 s"
    }
