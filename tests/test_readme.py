"""The README's Python runs, block after block, against a real Redis and a real worker."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs import Client, keys
from jobs.cli.status import workers

ROOT = Path(__file__).parent.parent
COMMAND = Path(sys.executable).parent / "chatjobs"
BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)


@pytest.fixture
def served(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A Redis with a worker for the demo model, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CHATJOBS_REDIS_URL", redis_url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    worker = subprocess.Popen([COMMAND, "work", "--model", "demo"], env=os.environ)
    with Client(redis_url) as client:
        while not workers(client.redis):
            assert worker.poll() is None, "the worker didn't start"
            time.sleep(0.1)
    yield redis_url
    worker.terminate()
    assert worker.wait(timeout=60) == 0


def wait_until_recorded(redis_url: str) -> None:
    """Return when no row is on its way to Parquet."""
    with Client(redis_url) as client:
        deadline = time.monotonic() + 60
        while any(client.redis.xlen(keys.outbox(run.decode())) for run in outboxes(client)):
            assert time.monotonic() < deadline, "rows stay in the outbox"
            time.sleep(0.1)


def outboxes(client: Client) -> set[bytes]:
    found: Any = client.redis.smembers(keys.OUTBOXES)
    return set(found)


def test_the_readme_runs(served: str, capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, Any] = {}
    printed = []
    for block in BLOCKS:
        exec(compile(block, "README.md", "exec"), namespace)
        printed.append(capsys.readouterr().out)
        wait_until_recorded(served)
    assert printed[0].strip() == "42"
    assert printed[1].startswith("invalid_request top_p: ")
    assert printed[2] == printed[3].removesuffix("\n")
    assert printed[-1].strip() == "100"
