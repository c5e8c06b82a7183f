"""`chatjobs work --tensor-parallel` with a real worker and followers that are really killed."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from jobs.client.job import Job
from jobs.store.worker_status import read_workers
from tests.cli.conftest import COMMAND
from tests.waiting import has_ended, wait_until
from tests.worker.site import PATIENCE, Site
from worker.kernels import library

pytestmark = pytest.mark.skipif(library.active() is None, reason="ranks need the CPU kernels")
CORES = sorted(os.sched_getaffinity(0))[:2]


class RankWorker:
    """A worker with two ranks, as a process."""

    def __init__(self, site: Site, *options: str) -> None:
        command = [str(COMMAND), "work", "-m", "demo", "--redis", site.url, "--results"]
        command += [str(site.folder), "--tensor-parallel", "2", "--dtype", "fp32", *options]
        # Another environment at the start: this one is executed, not forked from one with torch.
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": "0"},
        )
        self.output = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

        def serves() -> bool:
            assert self.process.poll() is None, self.output
            return self.process.pid in {one["pid"] for one in read_workers(site.redis)}

        wait_until(lambda: serves() and " serves demo" in self.output)
        (self.follower,) = [
            child
            for child in children(self.process.pid)
            if "worker.engine.follower" in words(child)
        ]

    def wait(self) -> int:
        code = self.process.wait(timeout=PATIENCE)
        self._reader.join(PATIENCE)
        return code

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.output += line
        self.process.stderr.close()


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for file in found for child in file.read_text().split()]


def words(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


Start = Callable[..., RankWorker]


@pytest.fixture
def start(site: Site) -> Iterator[Start]:
    found: list[RankWorker] = []

    def begin(*options: str) -> RankWorker:
        found.append(RankWorker(site, *options))
        return found[-1]

    yield begin
    for one in found:
        one.process.kill()
        one.wait()
        with suppress(ProcessLookupError):
            os.kill(one.follower, signal.SIGCONT)
    wait_until(lambda: all(has_ended(one.follower) for one in found))


def submit(site: Site, count: int, tokens: int) -> list[Job]:
    return site.client.submit_many(
        {
            "model": "demo",
            "messages": [{"role": "user", "content": "What is 17 + 25?"}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
            "job": {"run": "r", "row": n},
        }
        for n in range(count)
    )


def test_jobs_are_answered_by_both_ranks_and_sigterm_ends_them(site: Site, start: Start) -> None:
    devices = ["--devices", f"cpu:{CORES[0]},cpu:{CORES[-1]}"] if len(CORES) > 1 else []
    worker = start(*devices)
    if devices:
        assert os.sched_getaffinity(worker.process.pid) == {CORES[0]}
        assert os.sched_getaffinity(worker.follower) == {CORES[-1]}
    job = site.client.submit(
        {
            "model": "demo",
            "messages": [{"role": "user", "content": "What is 17 + 25?"}],
            "temperature": 0,
        }
    )
    assert job.result(timeout=PATIENCE).text == "42"
    worker.process.send_signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert has_ended(worker.follower)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_loses_a_rank_returns_its_jobs_and_ends(
    number: signal.Signals, site: Site, start: Start
) -> None:
    worker = start()
    jobs = submit(site, 2, 400)
    wait_until(lambda: all(job.status() == "started" for job in jobs))
    os.kill(worker.follower, number)
    assert worker.wait() not in (0, -signal.SIGKILL)
    assert "a model on several ranks ends with any of them" in worker.output
    assert "returned to the queues: 2 unfinished jobs" in worker.output
    assert has_ended(worker.follower)
    assert [job.status() for job in jobs] == ["queued", "queued"]
    other = start()
    completions = site.client.gather(jobs, timeout=PATIENCE)
    assert [one.usage.completion_tokens for one in completions] == [400, 400]
    assert other.process.poll() is None


def test_a_worker_that_is_killed_leaves_no_rank(site: Site, start: Start) -> None:
    worker = start()
    os.kill(worker.follower, signal.SIGSTOP)
    worker.process.kill()
    worker.wait()
    wait_until(lambda: has_ended(worker.follower))
