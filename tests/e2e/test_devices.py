"""`chatjobs work --devices` with real workers, one for each core, that are really killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from jobs import RequestFields
from jobs.client.job import Job
from jobs.store.worker_status import read_workers
from tests.cli.conftest import COMMAND
from tests.e2e.test_shutdown import generates
from tests.waiting import has_ended
from tests.worker.site import PATIENCE, Site, wait_until

CORES = sorted(os.sched_getaffinity(0))[:2]
DEVICES = [f"cpu:{core}" for core in CORES]
STARTED = re.compile(r"(cpu:\d+): started a worker: process (\d+)")
pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")


class Supervisor:
    """`chatjobs work --devices` as a process. `options` come behind those that all have."""

    def __init__(self, site: Site, *options: str, devices: list[str] = DEVICES) -> None:
        command = [str(COMMAND), "work", "-m", "demo", "--redis", site.url]
        command += ["--results", str(site.folder), "--devices", ",".join(devices), *options]
        # Another environment at the start: this one is executed, not forked from one with torch.
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": "0"},
        )
        self.output = ""
        self._site = site
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def workers(self) -> dict[str, list[int]]:
        """The processes that were started, by device."""
        found: dict[str, list[int]] = {device: [] for device in DEVICES}
        for device, pid in STARTED.findall(self.output):
            found[device].append(int(pid))
        return found

    def wait_until_serving(self) -> None:
        """Until the worker of each device serves."""

        def serve() -> bool:
            assert self.process.poll() is None, self.output
            pids = {one["pid"] for one in read_workers(self._site.redis)}
            return set(self.running) <= pids

        wait_until(lambda: len(self.running) == len(DEVICES) and serve())

    @property
    def running(self) -> list[int]:
        """The processes of its workers, those that it has started last."""
        return [own[-1] for own in self.workers().values() if own]

    @property
    def all_ended(self) -> bool:
        """Whether each worker that it has started has ended."""
        return all(has_ended(pid) for own in self.workers().values() for pid in own)

    def wait(self) -> int:
        code = self.process.wait(timeout=PATIENCE)
        self._reader.join(PATIENCE)
        return code

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.output += line
        self.process.stderr.close()


Start = Callable[..., Supervisor]


@pytest.fixture
def start(site: Site) -> Iterator[Start]:
    """Start one with these options; it is killed at the end, and its workers end."""
    found: list[Supervisor] = []

    def begin(*options: str, devices: list[str] = DEVICES) -> Supervisor:
        found.append(Supervisor(site, *options, devices=devices))
        return found[-1]

    yield begin
    for one in found:
        one.process.kill()
        one.wait()
        thaw(one)
    wait_until(lambda: all(one.all_ended for one in found))


def submit(site: Site, count: int) -> list[Job]:
    request: RequestFields = {
        "model": "demo",
        "messages": [{"role": "user", "content": "What is 17 + 25?"}],
        "max_tokens": 200,
        "ignore_eos": True,
        "temperature": 0,
    }
    return site.client.submit_many(
        {**request, "job": {"run": "r", "row": n, "priority": "interactive"}} for n in range(count)
    )


def held_by(site: Site, pids: list[int], jobs: list[Job]) -> dict[int, list[Job]]:
    """The jobs of each worker that have tokens. Others that it has claimed return to the queue when
    it stops."""
    held: dict[int, list[Job]] = {pid: [] for pid in pids}
    for job in jobs:
        if generates(site, job):
            name = site.hash(job).get("worker_name", "")
            for pid in pids:
                if f"-{pid}-" in name:
                    held[pid].append(job)
    return held


def frozen_while_running(site: Site, pids: list[int], jobs: list[Job]) -> dict[int, list[Job]]:
    """Freeze these workers at a moment at which each generates. Returns `held_by`."""
    while True:
        wait_until(lambda: all(held_by(site, pids, jobs).values()))
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
            wait_until(partial(is_stopped, pid))
        held = held_by(site, pids, jobs)
        if all(held.values()):
            return held
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def thaw(supervisor: Supervisor) -> None:
    for pid in supervisor.running:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def is_stopped(pid: int) -> bool:
    return ") T " in Path(f"/proc/{pid}/stat").read_text()


def test_a_killed_worker_is_started_again_and_its_jobs_finish(site: Site, start: Start) -> None:
    supervisor = start("--http", "0")
    supervisor.wait_until_serving()
    jobs = submit(site, 48)
    first, second = supervisor.running
    held = frozen_while_running(site, [first], jobs)[first]
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: len(supervisor.workers()[DEVICES[0]]) == 2)
    site.client.gather(jobs, timeout=PATIENCE)
    supervisor.wait_until_serving()
    assert supervisor.workers()[DEVICES[1]] == [second]
    assert not has_ended(second)
    assert f"{DEVICES[0]}: the worker ended (signal SIGKILL); another" in supervisor.output
    assert {site.hash(job)["chatjobs_attempt"] for job in held} == {"2"}
    site.client.wait_for_rows(jobs, timeout=PATIENCE)
    site.assert_settled(jobs, "r")


def test_a_worker_has_its_cores_and_the_supervisor_no_torch(site: Site, start: Start) -> None:
    supervisor = start()
    supervisor.wait_until_serving()
    for core, device in zip(CORES, DEVICES, strict=True):
        (pid,) = supervisor.workers()[device]
        assert os.sched_getaffinity(pid) == {core}
        assert "libtorch" in Path(f"/proc/{pid}/maps").read_text()
        assert f'{{"device":"{device}","time":' in supervisor.output
    assert "libtorch" not in Path(f"/proc/{supervisor.process.pid}/maps").read_text()
    names = {one["name"] for one in read_workers(site.redis)}
    assert len(names) == 2
    # A worker has no handler for it, nor for SIGHUP, which is ignored where nohup runs the tests.
    supervisor.process.send_signal(signal.SIGUSR1)
    assert supervisor.wait() == -signal.SIGUSR1
    assert supervisor.all_ended


def test_a_killed_supervisor_leaves_no_worker_and_no_job_is_lost(site: Site, start: Start) -> None:
    supervisor = start("--grace", "0")
    supervisor.wait_until_serving()
    jobs = submit(site, 48)
    frozen_while_running(site, supervisor.running, jobs)
    supervisor.process.kill()
    thaw(supervisor)
    wait_until(lambda: supervisor.all_ended)
    # They were told to stop and have returned their jobs; no other worker found them dead.
    assert "started" not in {job.status().value for job in jobs}
    assert {site.hash(job).get("chatjobs_lost") for job in jobs} == {None}
    site.worker(real=True, models=["demo"], lease_seconds=12.0)
    site.client.gather(jobs, timeout=PATIENCE)
    site.client.wait_for_rows(jobs, timeout=PATIENCE)
    site.assert_settled(jobs, "r")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_both_workers_drain_after_a_signal(
    site: Site, start: Start, number: signal.Signals
) -> None:
    supervisor = start("--grace", "3600")
    supervisor.wait_until_serving()
    jobs = submit(site, 48)
    held = frozen_while_running(site, supervisor.running, jobs)
    supervisor.process.send_signal(number)
    thaw(supervisor)
    assert supervisor.wait() == 0
    assert supervisor.output.count("stopping: no new jobs") == 2
    assert {job.status().value for own in held.values() for job in own} == {"finished"}
    assert {job.status().value for job in jobs} <= {"finished", "queued"}
    assert supervisor.all_ended


def test_a_second_signal_returns_the_jobs_at_once(site: Site, start: Start) -> None:
    supervisor = start("--grace", "3600")
    supervisor.wait_until_serving()
    jobs = submit(site, 48)
    frozen_while_running(site, supervisor.running, jobs)
    supervisor.process.send_signal(signal.SIGINT)
    thaw(supervisor)
    wait_until(lambda: supervisor.output.count("stopping: no new jobs") == 2)
    supervisor.process.send_signal(signal.SIGINT)
    assert supervisor.wait() in (0, 1)
    assert supervisor.all_ended
    assert {job.status().value for job in jobs} <= {"finished", "queued"}


def test_a_device_that_is_not_there_ends_all_with_its_reason(site: Site, start: Start) -> None:
    supervisor = start(devices=[DEVICES[0], "cuda:99"])
    assert supervisor.wait() == 3
    *_, last = supervisor.output.splitlines()
    assert last.startswith("error: the worker of cuda:99 can't start: device 'cuda:99' is not")
    assert supervisor.all_ended
    assert not read_workers(site.redis)


def test_workers_of_a_burst_end_with_the_queues(site: Site, start: Start) -> None:
    jobs = submit(site, 32)
    supervisor = start("--burst")
    assert supervisor.wait() == 0
    site.assert_settled(jobs, "r")
