"""The README's Python blocks run against a real Redis and worker; links of all pages exist."""

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
README = (ROOT / "README.md").read_text()
COMMAND = Path(sys.executable).parent / "chatjobs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


def blocks() -> Iterator[tuple[str, str]]:
    """The Python blocks in order, each with the heading above it."""
    heading = ""
    for title, code in re.findall(r"^#+ ([^\n]*)$|^```python\n(.*?)^```", README, re.M | re.S):
        heading = title or heading
        if code:
            yield heading, code


@pytest.fixture
def served(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A Redis with a worker for the demo model, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CHATJOBS_REDIS_URL", redis_url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    worker = subprocess.Popen([COMMAND, "work", "--model", "demo"], env=os.environ)
    with Client(redis_url) as client:
        while not workers(client.redis):
            assert worker.poll() is None, "the worker did not start"
            time.sleep(0.1)
    yield redis_url
    worker.terminate()
    assert worker.wait(timeout=60) == 0


def wait_until_recorded(redis_url: str) -> None:
    """Return when the outboxes are empty: all rows are in Parquet."""
    with Client(redis_url) as client:
        deadline = time.monotonic() + 60
        while any(client.redis.xlen(keys.outbox(run.decode())) for run in outboxes(client)):
            assert time.monotonic() < deadline, "rows remain in the outbox"
            time.sleep(0.1)


def outboxes(client: Client) -> set[bytes]:
    found: Any = client.redis.smembers(keys.OUTBOXES)
    return set(found)


def test_the_python_blocks_run(served: str, capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, Any] = {}
    printed: dict[str, list[str]] = {}
    for heading, code in blocks():
        exec(compile(code, "README.md", "exec"), namespace)
        printed.setdefault(heading, []).append(capsys.readouterr().out)
        wait_until_recorded(served)
    assert printed["Enqueue"] == ["42\n"]
    assert printed["Follow"] == ["42"]
    assert "42" in printed["Read Parquet"][0]
    assert printed["Errors"][0].startswith("invalid_request top_p: ")
    assert printed["asyncio"] == ["42\n"]
    assert "ok" in printed["Runs"][1]  # DuckDB
    assert printed["Runs"][-1] == "100\n"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_and_images_exist(page: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"", page.read_text())
    paths = [(link or attribute).partition("#")[0] for link, attribute in targets]
    missing = [
        path for path in paths if path and "://" not in path and not (page.parent / path).exists()
    ]
    assert not missing


def test_paths_in_the_readme_exist() -> None:
    """Files that are named in code spans, such as `constraints.txt`."""
    names = re.findall(r"(?<=[` ])[\w./-]+\.(?:py|txt|yml|md)\b", README)
    assert names
    assert not [name for name in names if not (ROOT / name).exists()]


def test_speed_figures_are_those_of_the_performance_page() -> None:
    (row,) = re.findall(r"^\| Speed .*$", README, re.M)
    figures = re.findall(r"\b\d\.\d\d\b", row)
    page = (ROOT / "docs/performance.md").read_text()
    assert figures
    assert not [figure for figure in figures if f"| {figure} |" not in page]
