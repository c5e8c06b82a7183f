"""A child process ends when it is stopped, and when its owner is killed."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from jobs.child import ChildProcess
from tests.jobs.test_embedded import alive
from tests.waiting import wait_until


def stubborn(ready: Path) -> list[str]:
    """A command that ignores all signals that can be ignored, once it has made the file."""
    script = f'trap "" TERM INT HUP; touch "{ready}"; while :; do sleep 0.1; done'
    return ["sh", "-c", script]


def test_a_killed_owner_takes_its_child_and_the_temporary_folder_with_it(tmp_path: Path) -> None:
    folder, ready = tmp_path / "temporary", tmp_path / "ready"
    folder.mkdir()
    code = (
        "import sys, time; from pathlib import Path; from jobs.child import ChildProcess\n"
        f"child = ChildProcess({stubborn(ready)!r}, temporary=Path(sys.argv[1]))\n"
        "print(child.pid, flush=True); time.sleep(600)"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    wait_until(ready.exists)
    assert alive(pid)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    wait_until(lambda: not alive(pid))
    wait_until(lambda: not folder.exists())


def test_stop_kills_a_child_that_ignores_termination(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    child = ChildProcess(stubborn(ready), output=subprocess.DEVNULL)
    wait_until(ready.exists)
    assert child.poll() is None
    started = time.monotonic()
    child.stop(0.3)
    assert time.monotonic() - started >= 0.3
    assert child.poll() == -9
    assert not alive(child.pid)
    child.stop(0.3)  # a second call changes nothing
