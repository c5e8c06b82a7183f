"""A process that the tests fork behaves as one that is executed."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.forked import COMMAND, SERVER, TEST_PROCESS, ForkingPopen, ForkServer

NOWHERE = "redis://127.0.0.1:1/0"


def ended(words: list[str], **options: Any) -> tuple[int, str, str]:
    process = ForkingPopen(
        [COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )
    output, errors = process.communicate()
    return process.returncode, output, errors


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--version"], 0),
        (["no-such-command"], 2),
        (["status", "--redis", NOWHERE], 3),
        (["submit", "rows.csv", "-m", "m", "--redis", NOWHERE], 2),
    ],
)
def test_a_forked_command_answers_as_an_executed_one(
    words: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"cwd": tmp_path, "env": {**os.environ, "COLUMNS": "200"}}
    forked = ended(words, **options)
    monkeypatch.setattr(ForkServer, "can_fork", lambda *_: False)
    assert forked == ended(words, **options)
    assert forked[0] == code


def test_a_forked_process_is_a_child_that_can_be_killed(redis_url: str) -> None:
    call: dict[str, Any] = {"args": [COMMAND], "executable": None, "env": None}
    call |= {"preexec_fn": None, "pass_fds": (), "shell": False}
    assert SERVER.can_fork(call)
    words = [COMMAND, "chat", "-m", "nobody", "--wait", "600", "hello", "--redis", redis_url]
    process = ForkingPopen(words, stderr=subprocess.PIPE)
    assert process.stderr is not None
    assert b"no worker serves" in process.stderr.readline()
    parent = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[1]
    assert int(parent) == os.getpid()
    process.kill()
    assert process.wait() == -signal.SIGKILL
    process.stderr.close()


def test_a_test_process_is_forked_with_torch_in_it() -> None:
    line = "import sys;exec(eval(sys.stdin.readline()))"
    process = ForkingPopen(
        [*TEST_PROCESS, line], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    code = "print(__name__, sys.argv, 'torch' in sys.modules)"
    assert process.communicate(f"{code!r}\n")[0] == "__main__ ['-c'] True\n"
    assert process.returncode == 0


def test_another_environment_of_the_interpreter_is_not_forked() -> None:
    call: dict[str, Any] = {"args": [COMMAND], "executable": None}
    call |= {"preexec_fn": None, "pass_fds": (), "shell": False}
    assert not SERVER.can_fork({**call, "env": {**os.environ, "PYTHONIOENCODING": "latin-1"}})
    assert not SERVER.can_fork({**call, "env": {}, "preexec_fn": os.getpid})
