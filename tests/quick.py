"""Selects the tests that need no Redis server, no process and no model: `pytest -p tests.quick`.

A file is left out, and not imported, if its text names what starts one of these; a test if one of
its fixtures does. A test that starts a process all the same fails.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

STARTS = re.compile(
    r"\b(?:subprocess|EmbeddedRedis|redis_url|tests\.(?:servers|test_containers)|[sS]ite|spawn|COMMAND"
    r"|make_checkpoint|Engine|EngineCore|transformers|ChatTemplate"
    r"|MetricProcess|score_run)\b|--local|\"score\""
)
FIXTURES = {"redis_server", "original", "checkpoint"}


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    if not collection_path.match("test_*.py"):
        return None
    return STARTS.search(collection_path.read_text("utf-8")) is not None or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    left_out = [item for item in items if FIXTURES & {*item.fixturenames}]
    items[:] = [item for item in items if not FIXTURES & {*item.fixturenames}]
    config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish() -> None:
    sys.addaudithook(_refuse_processes)


def _refuse_processes(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("subprocess.Popen", "os.posix_spawn"):
        raise RuntimeError(f"a quick test starts a process: {arguments[1]}")
