"""Every Lua script has a header that documents it, and compiles."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path

import pytest
import redis

from jobs.stream.entries import END_LUA

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted(
    path for package in ("jobs", "worker") for path in ROOT.glob(f"{package}/**/scripts/*.lua")
)


def test_scripts_are_found() -> None:
    assert {"rq_enqueue", "rq_cancel"} <= {path.stem for path in SCRIPTS}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_opens_with_a_header_that_describes_it(path: Path) -> None:
    text = path.read_text()
    header = "\n".join(takewhile(lambda line: line.startswith("--"), text.splitlines()))
    assert "Returns" in header
    if header.startswith("-- Prelude"):  # defines functions for other scripts
        assert "KEYS" not in text and "ARGV" not in text
    else:
        assert "KEYS" in header and "ARGV" in header


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_compiles(path: Path, redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        client.script_load(END_LUA + path.read_text())
