"""Workers and producers of version 0.2.0 and of this one use one Redis and one results folder.

The old code comes from the history of the repository.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from jobs import Client
from jobs.embedded import EmbeddedRedis
from tests.worker.site import ROOT, Site, wait_until

RELEASE = "9322f77e"  # made version 0.2.0
COMMAND = [sys.executable, "-P", "-c", "from jobs.cli import main; main()"]
ROWS = 6


@pytest.fixture
def old(tmp_path: Path) -> dict[str, str]:
    """The environment of a process that runs the code of version 0.2.0. It finds no compiler: its
    kernels would take minutes, for an answer or two."""
    made = subprocess.run(["git", "archive", RELEASE, "jobs", "worker"], cwd=ROOT, stdout=-1)
    if made.returncode:
        pytest.skip(f"the history of this copy lacks {RELEASE}")
    with tarfile.open(fileobj=io.BytesIO(made.stdout)) as archive:
        archive.extractall(tmp_path / "code", filter="data")
    return {**os.environ, "PYTHONPATH": str(tmp_path / "code"), "PATH": "/nowhere"}


def row(run: str, number: int, tokens: int = 8) -> Any:
    return {
        "model": "demo",
        "messages": [{"role": "user", "content": f"What is {number} + 1?"}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "job": {"run": run, "row": number, "priority": "bulk"},
    }


def submit(environment: dict[str, str], url: str, folder: Path, *words: str) -> str:
    """`chatjobs submit` of the old version, of ROWS rows; what it prints."""
    file = folder / "rows.jsonl"
    lines = [{"messages": row("", n)["messages"], "max_tokens": 8} for n in range(ROWS)]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    line = [*COMMAND, "submit", str(file), "--model", "demo", "--redis", url, *words]
    done = subprocess.run(line, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_workers_and_producers_of_both_versions_share_a_run(
    old: dict[str, str], tmp_path: Path
) -> None:
    with EmbeddedRedis() as server, Client(server.url) as client:
        site = Site(server.url, tmp_path / "results")
        options = ["--model", "demo", "--device", "cpu", "--redis", server.url, "-q"]
        place = ["--results", str(site.folder), "--grace", "0", "--max-batch", "2"]
        worker = subprocess.Popen([*COMMAND, "work", *options, *place], env=old)
        try:
            submit(old, server.url, tmp_path, "--run", "r")
            jobs = client.submit_many([row("r", n) for n in range(ROWS, 2 * ROWS)])
            wait_until(lambda: all(job.status() == "finished" for job in jobs))
            held = client.submit_many([row("r", n, 400) for n in range(2 * ROWS, 3 * ROWS)])
            wait_until(lambda: any(job.status() == "started" for job in held))
            site.worker(real=True, models=["demo"])
            worker.send_signal(signal.SIGTERM)  # its jobs go to the worker of this version
            assert worker.wait(600) == 0
            client.wait_for_rows(held, timeout=600)
            printed = submit(old, server.url, tmp_path, "--run", "again", "--wait", "--json")
            answers = [json.loads(line) for line in printed.splitlines()]
            assert [one["status"] for one in answers] == ["finished"] * ROWS
            client.run("r").wait(timeout=600)
            rows = site.rows("r")
            assert sorted(one["row_index"] for one in rows) == list(range(3 * ROWS))
            assert {one["status"] for one in rows} == {"ok"}
            assert len({one["worker_id"] for one in rows}) == 2
        finally:
            worker.kill()
            worker.wait()
            site.close()
