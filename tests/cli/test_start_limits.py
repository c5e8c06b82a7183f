"""Limits of the process that are too low for a model are named at start, with what to do."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.cli.conftest import COMMAND, Run
from worker.cli import start_limits

COMMANDS = ["work -m demo --redis embedded", "chat --local -m demo hi", "demo --rows 1"]

# Limits are set in the child, between fork and exec.
LIMITED = """
import os, resource, sys
for kind in sys.argv[1].split():
    resource.setrlimit(getattr(resource, kind), (int(sys.argv[2]),) * 2)
os.execv(sys.argv[3], sys.argv[3:])
"""


def limited(kinds: str, limit: int, words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LIMITED, kinds, str(limit), str(COMMAND), *words.split()]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("words", COMMANDS)
@pytest.mark.parametrize(
    ("kind", "option", "mebibytes", "need"),
    [("RLIMIT_AS", "-v", 600, 1024), ("RLIMIT_DATA", "-d", 200, 512)],
)
def test_a_limit_of_memory_is_named_with_what_is_needed(
    words: str, kind: str, option: str, mebibytes: int, need: int
) -> None:
    done = limited(kind, mebibytes << 20, words)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.count("\n") == 1, done.stderr
    assert f"`ulimit {option}` gives this process {mebibytes} MiB" in done.stderr
    assert f"needs {need} MiB: raise it (ulimit {option} unlimited)" in done.stderr


def test_limits_that_are_high_enough_are_no_obstacle() -> None:
    done = limited("RLIMIT_AS RLIMIT_DATA", 8 << 30, "chat --local -q -m demo 2+3")
    assert (done.returncode, done.stdout) == (0, "5\n"), done.stderr


@pytest.mark.parametrize("words", COMMANDS)
@pytest.mark.parametrize("possible", [0, 5])
def test_a_limit_of_threads_is_named(
    run: Run, monkeypatch: pytest.MonkeyPatch, words: str, possible: int
) -> None:
    """`ulimit -u` does not limit root: as Python reports it."""
    start, started = threading.Thread.start, []

    def limited_start(thread: threading.Thread) -> None:
        if len(started) == possible:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited_start)
    done = run(*words.split())
    assert done.exit_code == 3
    assert done.stderr.count("\n") == 1, done.stderr
    assert "this process can't start more threads" in done.stderr
    assert "raise `ulimit -u`" in done.stderr


def test_other_commands_name_it_as_well(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    done = run("status")
    assert done.exit_code == 3
    assert "this process can't start more threads: raise `ulimit -u`" in done.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root is exempt from RLIMIT_NPROC")
@pytest.mark.parametrize("words", COMMANDS)
def test_the_real_limit_of_threads_is_named(words: str) -> None:
    done = limited("RLIMIT_NPROC", 1, words)
    assert done.returncode == 3
    assert "raise `ulimit -u` (1 now" in done.stderr


@pytest.mark.parametrize("words", COMMANDS)
def test_the_memory_of_a_container_is_named(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: str
) -> None:
    file = tmp_path / "memory.max"
    monkeypatch.setattr(start_limits, "CGROUPS", (tmp_path / "none", file))
    file.write_text(f"{256 << 20}\n")
    done = run(*words.split())
    assert done.exit_code == 3
    assert f"has 256 MiB of memory ({file})" in done.stderr
    assert "needs 384 MiB: raise its limit (docker run --memory" in done.stderr


@pytest.mark.parametrize("text", ["max\n", f"{8 << 30}\n", "9223372036854771712\n"])
def test_a_container_with_room_is_no_obstacle(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    file = tmp_path / "memory.max"
    file.write_text(text)
    monkeypatch.setattr(start_limits, "CGROUPS", (file,))
    assert start_limits.start_fault() == ""
