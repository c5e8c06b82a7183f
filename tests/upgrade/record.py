"""Records what a version of chatjobs leaves in Redis and in files, for test_upgrade.py.

    git worktree add /tmp/old e363a82
    PYTHONPATH=/tmp/old unshare -u sh -c '
        hostname host && python tests/upgrade/record.py tests/upgrade/e363a82'

The code of the old version runs: its library, its commands and its workers, with the demo model on
the CPU. This file uses only what all versions have.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory

from rq import Queue
from rq.serializers import JSONSerializer

sys.path.append(str(Path(__file__).parents[2]))  # behind PYTHONPATH, for tests.upgrade

import jobs
from jobs import Client, WaitTimeout
from jobs.embedded import EmbeddedRedis
from jobs.store.worker_status import read_workers
from tests.upgrade import contents, redis_text

MAIN = "from jobs.cli import main; main()"
CHATJOBS = [sys.executable, "-P", "-c", MAIN]
DIES_BEFORE_A_FILE = [
    *(sys.executable, "-P", "-c"),
    "import os; from worker.record.recorder import Recorder; "
    f"Recorder._write = lambda *_, **__: os.kill(os.getpid(), 9); {MAIN}",
]


def command(*words: str) -> None:
    subprocess.run([*CHATJOBS, *words], check=True)


@contextmanager
def worker(
    url: str,
    *words: str,
    end: signal.Signals = signal.SIGTERM,
    program: Sequence[str] = tuple(CHATJOBS),
) -> Iterator[None]:
    options = ["--model", "demo", "--device", "cpu", "--dtype", "bf16", "--redis", url, "--quiet"]
    process = subprocess.Popen([*program, "work", *options, *words])
    try:
        with Client(url) as client:
            deadline = time.monotonic() + 120
            while not any(one["pid"] == process.pid for one in read_workers(client.redis)):
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.1)
        yield
    finally:
        process.send_signal(end)
        process.wait()


def run_jobs(client: Client, url: str, results: Path, states: Path) -> None:
    """What workers leave: results, streams, rows, a session with its state, and an outbox."""
    with worker(url, "--results", str(results), "--state-dir", str(states)):
        first, second = contents.WRITTEN[:2], contents.WRITTEN[2:]
        client.wait_for_rows(client.submit_many(first), timeout=60)
        jobs = client.submit_many(second)
        next(jobs[1].stream())
        jobs[1].cancel()
        client.wait_for_rows(jobs, timeout=60)
        streamed = client.submit(contents.STREAMED)
        list(streamed.stream())
        client.wait_for_rows([streamed, client.submit(contents.FINISHED)], timeout=60)
        session = client.session("talk", model="demo", system=contents.SESSION, temperature=0)
        for text in contents.TURNS[:2]:
            session.send(text, max_tokens=8)
    with worker(url, "--results", str(results), program=DIES_BEFORE_A_FILE):
        jobs = client.submit_many(contents.PLANNED)
        with suppress(WaitTimeout):
            client.wait_for_rows(jobs, timeout=10)
    with worker(url, "--no-record"):
        for job in client.submit_many(contents.UNWRITTEN):
            job.result(timeout=60)
    with worker(url, "--no-record", end=signal.SIGKILL):
        chunks = client.submit(contents.OPEN).stream()
        for _ in range(5):
            next(chunks)


def queue_jobs(client: Client) -> None:
    """What producers leave."""
    client.submit_many(contents.WAITING)
    client.submit(contents.EXPIRED)
    session = client.session("talk")
    for text in contents.TURNS[2:]:
        session.submit(text, wait=True, max_tokens=8)
    queue = Queue("chat:demo", connection=client.redis, serializer=JSONSerializer)
    job, dependent = contents.RQ
    func, request = "worker.tasks.chat_completion", contents.chat(job)
    queue.enqueue(func, request=request, job_id=job)
    queue.enqueue(func, request=request, job_id=dependent, depends_on=job)


def main() -> None:
    target = Path(sys.argv[1])
    print("recorded by", jobs.__file__)
    rmtree(target, ignore_errors=True)
    target.mkdir()
    results, states = target / "results", target / "states"
    with EmbeddedRedis() as server, Client(server.url) as client, TemporaryDirectory() as folder:
        command("limits", "tenant_running=1", "--tenant", "acme", "--redis", server.url)
        run_jobs(client, server.url, results, states)
        queue_jobs(client)
        file = contents.write_file(Path(folder))
        command("submit", str(file), "--model", "demo", "--run", "file", "--redis", server.url)
        redis_text.save(client.redis, target / "redis.jsonl")
        text = Path(folder) / "system.txt"
        text.write_text(contents.CACHED)
        cache = target / "prompt.safetensors"
        options = ["--model", "demo", "--device", "cpu", "--dtype", "bf16"]
        command("prompts", "save", *options, "--system", str(text), "-o", str(cache))


if __name__ == "__main__":
    main()
