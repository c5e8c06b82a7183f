"""Running the command: in this process for its words, as a process of its own for its manners."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from jobs.cli import build

COMMAND = Path(sys.executable).parent / "chatjobs"
NOWHERE = "redis://127.0.0.1:1/0"

Run = Callable[..., Result]
Spawn = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run("status", "--json", input=…)`; without --redis there is no Redis."""
    monkeypatch.setenv("CHATJOBS_REDIS_URL", NOWHERE)

    def invoke(*words: str, input: str | bytes | None = None) -> Result:
        return CliRunner().invoke(build(), words, input=input)

    return invoke


@pytest.fixture
def spawn() -> Spawn:
    """`spawn("chat", …)` as a real process with pipes."""

    def start(*words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [COMMAND, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start
