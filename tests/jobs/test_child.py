"""A child process ends when it is stopped, and when its owner is killed."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from jobs.child import ChildProcess
from tests.jobs.test_embedded import alive
from tests.waiting import wait_until

# A child that ignores all signals that can be ignored.
STUBBORN = ["sh", "-c", 'trap "" TERM INT HUP; echo ready; while :; do sleep 0.1; done']


def test_a_killed_owner_takes_its_child_and_the_temporary_folder_with_it(tmp_path: Path) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    code = (
        "import sys, time; from pathlib import Path; from jobs.child import ChildProcess\n"
        f"child = ChildProcess({STUBBORN!r}, temporary=Path(sys.argv[1]))\n"
        "print(child.pid, flush=True); time.sleep(600)"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    lines = {owner.stdout.readline().strip() for _ in range(2)}
    (pid,) = lines - {"ready"}
    assert alive(int(pid))
    owner.kill()
    owner.wait()
    owner.stdout.close()
    wait_until(lambda: not alive(int(pid)))
    wait_until(lambda: not folder.exists())


def test_stop_kills_a_child_that_ignores_termination(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    command = ["sh", "-c", f'trap "" TERM; touch "{ready}"; while :; do sleep 0.1; done']
    child = ChildProcess(command, output=subprocess.DEVNULL)
    wait_until(ready.exists)
    assert child.poll() is None
    started = time.monotonic()
    child.stop(0.3)
    assert time.monotonic() - started >= 0.3
    assert child.poll() == -9
    assert not alive(child.pid)
    child.stop(0.3)  # a second call changes nothing
