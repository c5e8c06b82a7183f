"""End to end with a real Redis, real worker processes and the demo model."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from jobs import Client, Results
from jobs.embedded import EmbeddedRedis
from worker.cli.demo_run import demo_requests

COMMAND = Path(sys.executable).with_name("chatjobs")
SECONDS = 180.0


def start_worker(url: str, results: Path) -> subprocess.Popen[bytes]:
    words = ("work", "--model", "demo", "--redis", url, "--results", str(results), "-q")
    return subprocess.Popen([COMMAND, *words])


def finished(results: Results, run: str) -> int:
    return results.dataset(run).count_rows() if run in results.runs() else 0


def test_a_killed_worker_neither_loses_nor_duplicates_rows(tmp_path: Path) -> None:
    count, results = 160, Results(tmp_path)
    with EmbeddedRedis() as redis, Client(redis.url) as client:
        jobs = client.submit_many(demo_requests(count, "killed"))
        worker = start_worker(redis.url, tmp_path)
        jobs[count // 16].result(timeout=SECONDS)
        worker.kill()
        worker.wait()
        left = [job for job in jobs if job.status() != "finished"]
        assert left, "all jobs had finished before the worker was killed"
        worker = start_worker(redis.url, tmp_path)
        try:
            completions = [job.result(timeout=SECONDS) for job in jobs]
            deadline = time.monotonic() + SECONDS
            while finished(results, "killed") < count and time.monotonic() < deadline:
                time.sleep(0.1)
        finally:
            worker.terminate()
            assert worker.wait(timeout=SECONDS) == 0
    rows = results.table(run="killed").to_pylist()
    assert Counter(row["row_index"] for row in rows) == Counter(range(count))
    by_job = {row["job_id"]: row["text"] for row in rows}
    assert by_job == {
        job.id: completion.text for job, completion in zip(jobs, completions, strict=True)
    }
    assert {row["status"] for row in rows} == {"ok"}


def test_the_demo_prints_an_accuracy_table_and_a_correct_answer(tmp_path: Path) -> None:
    words = ("demo", "--rows", "60", "--run", "tour", "--results", str(tmp_path))
    done = subprocess.run([COMMAND, *words], capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("17 + 25")[-1].split()[-1:] != []
    assert "42" in done.stdout.split("What is 17 + 25?")[-1]
    assert "accuracy" in done.stdout
    rows = Results(tmp_path).table(run="tour").to_pylist()
    assert len(rows) == 60
    right = sum(row["text"].strip() == row["target"] for row in rows)
    assert right / len(rows) >= 0.85
    assert {json.loads(row["metadata"])["task"] for row in rows} > {"addition"}
