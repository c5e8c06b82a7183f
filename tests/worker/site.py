"""Shared by the tests of the queue side: a Redis, a results folder, workers as real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from jobs import Client, Results, keys
from jobs.client.job import Job
from jobs.store.worker_status import read_workers
from tests.waiting import PATIENCE as PATIENCE
from tests.waiting import wait_until as wait_until
from tests.worker.fake_backend import FakeBackend
from worker.model_spec import ModelSpec
from worker.service import serve

ROOT = Path(__file__).parents[2]
QUICK: dict[str, Any] = {"lease_seconds": 1.0, "part_seconds": 0.2}


def _bit(number: signal.Signals) -> int:
    return 1 << (number - 1)


class WorkerProcess:
    """A worker as a process. It has a fake backend unless an option is `real`, and writes no rows
    without a folder for results."""

    def __init__(self, url: str, results: Path | None, **options: Any) -> None:
        options = {**QUICK, "redis_url": url, "results": results and str(results), **options}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.worker.fake_worker", json.dumps(options)],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.output = ""  # of stderr
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def send(self, number: signal.Signals) -> None:
        """Returns when the process has it: a second one that comes before would be lost."""
        self._process.send_signal(number)
        wait_until(lambda: not self._waits_for(number))

    def freeze(self) -> None:
        self.send(signal.SIGSTOP)

    def thaw(self) -> None:
        self.send(signal.SIGCONT)

    def wait(self) -> int:
        """Exit code, negative for a signal."""
        code = self._process.wait(timeout=PATIENCE)
        self._reader.join(PATIENCE)
        return code

    def stop(self) -> int:
        """SIGTERM, once the process handles it: it would end one that is still imported."""
        wait_until(lambda: not self.alive or self._mask("SigCgt") & _bit(signal.SIGTERM))
        self.send(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        if self.alive:
            self.send(signal.SIGKILL)
            self.thaw()
        self.wait()

    def _waits_for(self, number: signal.Signals) -> bool:
        """True if the process runs and has not received a signal that was sent to it."""
        return self.alive and bool(self._mask("ShdPnd") & ~self._mask("SigIgn") & _bit(number))

    def _mask(self, name: str) -> int:
        """A set of signals, as the kernel gives it; none if the process has ended."""
        with suppress(OSError):
            for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
                if line.startswith(f"{name}:"):
                    return int(line.split()[1], 16)
        return 0

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:  # a full pipe would block the worker
            self.output += line
        self._process.stderr.close()


class Site:
    """One Redis and one results folder: producer, workers and readers."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder
        self.client = Client(url)
        self.redis: Any = self.client.redis  # its stubs leave open whether replies are bytes
        self.results = Results(folder)
        self._workers: list[WorkerProcess] = []

    def submit(self, prompt: str = "hello", **fields: Any) -> Job:
        return self.submit_many([prompt], **fields)[0]

    def submit_many(self, prompts: list[str], **fields: Any) -> list[Job]:
        """`fields`: of the request, of its `job`, and instructions to the fake backend. Rows of a
        run count from `first_row`."""
        first_row = fields.pop("first_row", 0)
        options = {
            name: fields.pop(name)
            for name in (
                *("id", "run", "priority", "ttl", "retries", "result_ttl", "tenant", "delay", "at"),
            )
            if name in fields
        }
        instructions = (
            "words",
            "fail",
            "kill",
            "die",
            "refuse",
            "panic",
            "slow",
            "block",
            "block_cancel",
            "unforkable",
        )
        metadata = {name: str(fields.pop(name)) for name in instructions if name in fields}
        request = {"model": "fake", "metadata": metadata, **fields}
        requests: Any = (
            {
                **request,
                "messages": [{"role": "user", "content": prompt}],
                "job": {"row": number, **options} if "run" in options else options,
            }
            for number, prompt in enumerate(prompts, first_row)
        )
        return self.client.submit_many(requests)

    def burst(self, backend: FakeBackend | None = None, **options: Any) -> FakeBackend:
        """Serve in this process until the queues are empty."""
        backend = backend or FakeBackend()
        models = options.pop("models", ["fake"])
        options = {**QUICK, "burst": True, "redis_url": self.url, "results": self.folder, **options}
        serve(backend, [ModelSpec(reference=one) for one in models], **options)
        return backend

    @contextmanager
    def settings(self, **values: str) -> Iterator[None]:
        """Change settings of Redis for a while."""
        before = {name: self.redis.config_get(name)[name] for name in values}
        for name, value in values.items():
            self.redis.config_set(name, value)
        try:
            yield
        finally:
            for name, value in before.items():
                self.redis.config_set(name, value)

    @contextmanager
    def paused_server(self) -> Iterator[None]:
        """Redis does not reply for a while; its connections stay open."""
        pid = self.redis.info("server")["process_id"]
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def worker(self, **options: Any) -> WorkerProcess:
        """Start a worker process, killed at the end of the test. `results`: its folder, instead of
        that of the site."""
        results = options.pop("results", self.folder)
        self._workers.append(WorkerProcess(self.url, results, **options))
        return self._workers[-1]

    def wait_for_workers(self, count: int = 1) -> None:
        """Until so many serve: one that loads its models is listed before."""
        wait_until(lambda: len(read_workers(self.redis)) >= count)

    def rows(self, run: str = "default") -> list[Any]:
        return self.results.table(run).to_pylist() if run in self.results.runs() else []

    def written(self, run: str = "default") -> list[tuple[str, int]]:
        """Job and choice of each row in the files, as any reader of Parquet sees them: `rows` drops
        those of older attempts."""
        files = self.results.files(run) if run in self.results.runs() else []
        rows = [row for file in files for row in pq.read_table(file).to_pylist()]
        return [(row["job_id"], row["choice_index"]) for row in rows]

    def row(self, job: Job, run: str = "default") -> Any:
        (row,) = [row for row in self.rows(run) if row["job_id"] == job.id]
        return row

    def hash(self, job: Job) -> dict[str, str]:
        """The job's hash in Redis; bytes that are not UTF-8 are replaced."""
        found = self.redis.hgetall(f"rq:job:{job.id}")
        return {key.decode(): value.decode(errors="replace") for key, value in found.items()}

    def assert_settled(self, jobs: list[Job], run: str = "default") -> None:
        """Assert that each job has ended with one row on disk, and that Redis is cleaned up."""
        unsettled = [job.id for job in jobs if not job.status().over]
        assert not unsettled
        counts = Counter(self.written(run))
        assert set(counts.values()) <= {1}, {key: n for key, n in counts.items() if n > 1}
        assert {job.id for job in jobs} <= {row["job_id"] for row in self.rows(run)}
        for key in (keys.outbox(run), keys.parts(run), keys.OUTBOXES):
            assert not self.redis.exists(key), key
        leftovers = list(self.redis.scan_iter("rq:wip:*")) + list(self.redis.scan_iter("rq:exec*"))
        leftovers += list(self.redis.scan_iter("rq:queue:*"))
        assert not leftovers
        assert not list(self.folder.glob("*/_tmp/*"))

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()
        self.client.close()
