"""Ctrl-C at any moment: exit code 130 and no traceback; commands say what goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jobs import Client
from tests.cli.conftest import Spawn
from tests.waiting import PATIENCE
from worker.demo import DATASET

ROOT = Path(__file__).parents[2]

# Runs the command line, and sends SIGINT to itself when the module TARGET is imported.
IMPORTING = """
import importlib.abc, os, signal, sys
class Interrupt(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {target!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
sys.argv = ["chatjobs", *{words!r}]
from jobs.cli import main
main()
"""


def test_nothing_is_imported_before_ctrl_c_is_handled() -> None:
    code = (
        "import contextlib, re, signal, sys; before = set(sys.modules)\n"
        "from jobs.cli import main; print(*sorted(set(sys.modules) - before))"
    )
    words = [sys.executable, "-S", "-c", code]  # -S: an editable install imports modules of its own
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.stdout.split() == ["__future__", "jobs", "jobs.cli", "jobs.cli.interrupts"]


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("jobs.cli.failures", "--help"),
        ("jobs.errors", "chat -m demo hi"),
        ("click", "--help"),
        ("pydantic", "chat -m demo hi"),
        ("redis", "status"),
        ("pyarrow", "results --results ."),
        ("worker.host.engine_host", "work -m demo --redis embedded"),
        ("torch", "work -m demo --redis embedded"),
        ("safetensors", "models check demo"),
        ("rich", "demo"),
    ],
)
def test_ctrl_c_while_modules_are_imported(target: str, words: str) -> None:
    code = IMPORTING.format(target=target, words=words.split())
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE
    )
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.splitlines()[-1] == "interrupted"
    assert "Traceback" not in done.stderr


def test_ctrl_c_in_a_destructor_is_not_lost() -> None:
    code = (
        "import os, select, signal\n"
        "from jobs.cli.interrupts import exit_on_interrupt, interrupts_raise\n"
        "class Freed:\n"
        "    def __del__(self):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "exit_on_interrupt()\n"
        "with interrupts_raise():\n"
        "    try:\n"
        "        Freed()\n"
        "        select.select([], [], [])  # until a signal\n"
        "    except KeyboardInterrupt:\n"
        "        print('raised')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE
    )
    assert (done.stdout, done.stderr, done.returncode) == ("raised\n", "", 0)


def test_ctrl_c_while_a_model_is_loaded(redis_url: str, tmp_path: Path) -> None:
    words = ["work", "-m", "demo", "--redis", redis_url, "--results", str(tmp_path)]
    code = (
        "import os, signal\n"
        "from worker.host.engine_host import EngineHost\n"
        "load = EngineHost.load\n"
        "def interrupted(self, reference):\n"
        "    load(self, reference)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    return load(self, reference)\n"
        "EngineHost.load = interrupted\n"
        "from jobs.cli import main; main()\n"
    )
    command = [sys.executable, "-m", "tests.run_code", code, "chatjobs", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 130
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1] == "interrupted"


@pytest.mark.parametrize("module", ["renderer", "counter"])
def test_a_child_of_a_dead_worker_prints_no_traceback(module: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", f"worker.prompt.{module}", str(2**31)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin and process.stdout and process.stderr
    process.stdout.close()
    requests = [{"template": "a", "values": None, "seconds": 2}]
    if module == "counter":
        tokenizer = json.loads((DATASET.parent / "model/tokenizer.json").read_text())
        requests = [tokenizer, {"text": "a", "context": 9, "longest": 9, "seconds": 2}]
    process.stdin.write(b"".join(json.dumps(request).encode() + b"\n" for request in requests))
    process.stdin.close()
    with process.stderr as errors:
        assert errors.read() == b""
    assert process.wait(timeout=PATIENCE) == 1


def test_follow_says_what_it_waits_for_and_that_the_job_goes_on(
    spawn: Spawn, redis_url: str
) -> None:
    with Client(redis_url) as client:
        job = client.submit({"model": "m", "messages": [{"role": "user", "content": "Hi"}]})
        process = spawn("follow", job.id, "--redis", redis_url)
        assert process.stderr is not None
        assert "no worker serves 'm'" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE)
        assert (process.returncode, out) == (130, "")
        assert err == (
            f"interrupted; job {job.id} goes on: chatjobs follow {job.id} shows its answer, "
            f"chatjobs cancel {job.id} stops it\n"
        )
        assert job.status() == "queued"


@pytest.mark.parametrize("named", [True, False])
def test_a_run_says_that_another_model_can_be_named(
    spawn: Spawn, redis_url: str, tmp_path: Path, named: bool
) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"prompt": "hi", "model": "m"}\n')
    words = ("--results", str(tmp_path / "results"), *(("-m", "m") if named else ()))
    process = spawn("run", str(file), "--redis", redis_url, *words)
    assert process.stderr is not None
    line = process.stderr.readline()
    assert "no worker serves 'm'" in line
    assert line.endswith(
        "the run waits until one does\n"
        if named
        else "the run waits until one does; --model M runs all rows with another one\n"
    )
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "0 of about 1 rows are done, and no row is left in Redis" in err
    assert "waiting for" not in err  # no row runs


def test_chat_says_what_it_waits_for_and_that_the_job_is_cancelled(
    spawn: Spawn, redis_url: str
) -> None:
    process = spawn("chat", "-m", "m", "-o", 'job={"id": "mine"}', "--redis", redis_url, "hi")
    assert process.stderr is not None
    assert "no worker serves 'm'" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err) == (130, "interrupted; job mine is cancelled\n")
    with Client(redis_url) as client:
        assert client.job("mine").status() == "cancelled"


FIRST = ["unshare", "--user", "--map-root-user", "--pid", "--fork"]  # as in a container
MAY_BE_FIRST = subprocess.run([*FIRST, "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not MAY_BE_FIRST, reason="this user makes no namespaces")
def test_sigterm_ends_the_first_process_of_a_container_before_it_serves() -> None:
    """The kernel drops signals to it for which it has no handler."""
    code = (
        "import sys\nfrom jobs import cli\n"
        "def wait(**_): print('waits', flush=True); sys.stdin.read()\n"
        "cli.build = lambda: wait\ncli.main()"
    )
    process = subprocess.Popen(
        [*FIRST, sys.executable, "-c", code], cwd=ROOT, stdin=-1, stdout=-1, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "waits\n"
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGTERM)
    try:
        assert process.wait(PATIENCE) == 143
    finally:
        process.communicate()  # the end of its input ends it
