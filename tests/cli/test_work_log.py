"""The log of a worker names what it uses, and no worker depends on its log."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from jobs import ChatRequest, Client
from tests.cli.conftest import COMMAND, Run

REQUEST = ChatRequest(
    model="demo",
    messages=[{"role": "user", "content": "2+3?"}],
    max_tokens=4,
    ignore_eos=True,
)


@pytest.mark.parametrize("stderr", ["no reader", "a full disk", "closed"])
@pytest.mark.filterwarnings("ignore::jobs.NobodyServes")
def test_a_worker_whose_log_can_not_be_written_works(
    redis_url: str, tmp_path: Path, stderr: str
) -> None:
    command = [
        str(COMMAND),
        *["work", "--model", "demo", "--burst", "--redis"],
        redis_url,
        "--results",
    ]
    command.append(str(tmp_path / "results"))
    with Client(redis_url) as client:
        job = client.submit(REQUEST)
        if stderr == "no reader":
            read, write = os.pipe()
            os.close(read)
            done = subprocess.run(command, stderr=write)
            os.close(write)
        elif stderr == "a full disk":
            with open("/dev/full", "wb") as full:
                done = subprocess.run(command, stdout=full, stderr=full)
        else:
            done = subprocess.run(["sh", "-c", 'exec "$@" 2>&-', "sh", *command])
        assert done.returncode == 0
        assert job.result(timeout=1).usage.completion_tokens == 4


def test_the_device_is_named(run: Run, redis_url: str, tmp_path: Path) -> None:
    words = ["--model", "demo", "--device", "cpu", "--burst", "--redis", redis_url]
    worked = run("work", *words, "--results", str(tmp_path))
    assert worked.exit_code == 0
    assert "device: cpu" in worked.stderr.splitlines()
