"""The workers of a soak: real processes, replaced when they end, as a service manager does."""

from __future__ import annotations

import resource
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import redis

from jobs import keys
from jobs.store.rq_layout import LOST, job_key
from tests.soak.plan import LEASE_SECONDS, WORKERS
from tests.soak.producers import MODELS
from tests.worker.site import WorkerProcess
from worker.queue.reaper import SUSPECT_LOST

SERVED = (list(MODELS), [MODELS[0]], [MODELS[1]])  # by each worker
EXIT_REFUSED = 3  # fake_worker.py: Redis was away when it started
FILE_BYTES = 2048  # of a file on a full disk
LOOK_SECONDS = 0.1


class Crew:
    """`exits`: how processes have ended, by exit code. `outputs`: of those that should not have."""

    def __init__(self, url: str, results: Path) -> None:
        self._url, self._results = url, results
        self.exits: Counter[int] = Counter()
        self.outputs: list[str] = []
        self._ended = threading.Event()
        self._running = [self._start(number) for number in range(WORKERS)]
        self._thread = threading.Thread(target=self._supervise, name="crew", daemon=True)
        self._thread.start()

    def send(self, number: int, signal_: signal.Signals) -> None:
        worker = self._running[number]
        if worker.alive:
            worker.send(signal_)

    def freeze(self, number: int, seconds: float) -> None:
        worker = self._running[number]
        worker.freeze()
        time.sleep(seconds)
        worker.thaw()

    def fill_disk(self, seconds: float) -> None:
        """Let every write past FILE_BYTES of a file fail, as on a full disk (with EFBIG)."""
        self._limit_files(FILE_BYTES)
        time.sleep(seconds)
        self._limit_files(resource.RLIM_INFINITY)

    def runs_suspects(self, client: Any, number: int) -> bool:
        """True if one more death of this worker would rightly be blamed on a job."""
        lost = [client.hget(job_key(job), LOST) for job in self.jobs_of(client, number)]
        return any(int(times or 0) >= SUSPECT_LOST for times in lost)

    def jobs_of(self, client: Any, number: int) -> list[str]:
        """The jobs that a worker runs."""
        pid = f"-{self._running[number].pid}-"
        names = [one.decode() for one in client.zrange(keys.WORKERS, 0, -1) if pid in one.decode()]
        entries = [entry for name in names for entry in client.zrange(keys.started(name), 0, -1)]
        return [entry.decode().split(" ")[1] for entry in entries]

    def finish(self) -> None:
        """Stop all workers, and let one write the rows that are left."""
        self._ended.set()
        self._thread.join()
        for worker in self._running:
            worker.send(signal.SIGTERM)
        for worker in self._running:
            self._note(worker)
        last = self._start(0, burst=True)
        self._note(last)

    def kill(self) -> None:
        self._ended.set()
        self._thread.join()
        for worker in self._running:
            worker.kill()

    def _start(self, number: int, **options: Any) -> WorkerProcess:
        options |= {"lease_seconds": LEASE_SECONDS, "part_seconds": 2.0, "grace": 1.0}
        options |= {"models": SERVED[number], "delay": 0.005, "max_batch": 8}
        return WorkerProcess(self._url, self._results, **options)

    def _supervise(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            for number, worker in enumerate(self._running):
                if not worker.alive:
                    self._note(worker)
                    self._running[number] = self._start(number)

    def _note(self, worker: WorkerProcess) -> None:
        code = worker.wait()
        self.exits[code] += 1
        if code == EXIT_REFUSED and "unavailable" in worker.output:
            return
        # SIGTERM ends a process that does not serve yet.
        if code not in (0, -signal.SIGKILL, -signal.SIGTERM):
            self.outputs.append(f"exit code {code}: {worker.output[-4000:]}")

    def _limit_files(self, size: int) -> None:
        for worker in self._running:
            try:
                _, hard = resource.prlimit(worker.pid, resource.RLIMIT_FSIZE)
                resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, (size, hard))
            except ProcessLookupError:
                continue


def may_kill(crew: Crew, url: str, number: int) -> bool:
    """True if a fault of this worker blames no job. False while Redis is away."""
    try:
        with redis.Redis.from_url(url) as client:
            return not crew.runs_suspects(client, number)
    except redis.RedisError:
        return False
