"""The steps of bench.gpu_check, with other commands in their place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench import gpu_check
from bench.gpu_check import Report, Step, check, run
from tests.waiting import has_ended, wait_until


def step(script: str, limit: float = 60) -> Step:
    return Step("the step", (sys.executable, "-c", script), limit)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "report.txt"


@pytest.fixture
def report(file: Path) -> Report:
    return Report(file.open("w", encoding="utf-8"))


def test_what_a_step_prints_is_shown_and_reported(
    report: Report, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(step("import sys; print('out'); print('bad', file=sys.stderr)"), report) is None
    for text in (file.read_text(), capsys.readouterr().out):
        assert "out\n" in text and "bad\n" in text


@pytest.mark.parametrize(
    ("script", "how"),
    [
        ("raise SystemExit(3)", "exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", "signal 9"),
    ],
)
def test_a_step_that_fails_or_is_killed_fails_the_check(
    script: str, how: str, report: Report, file: Path
) -> None:
    """The others run all the same."""
    assert not check([step("")], [step(script), step("print('later')")], report)
    assert f"the step ended with {how}\n" in file.read_text()
    assert "later\n" in file.read_text()


def test_a_check_whose_steps_end_well_is_well(report: Report, file: Path) -> None:
    assert check([Step("none", ("no-such-command",), 1), step("")], [step("")], report)
    assert file.read_text().endswith("the tests and the benchmark ended well\n")


def test_nothing_runs_without_a_gpu_that_can_be_used(report: Report, file: Path) -> None:
    assert not check([step("raise SystemExit('no card')")], [step("print('later')")], report)
    lines = file.read_text().splitlines()
    assert lines[-3] == "no card"
    assert lines[-1] == "the step ended with exit code 1: nothing else was run"


def test_a_step_that_hangs_is_killed_with_what_it_started(report: Report, file: Path) -> None:
    """A child of it keeps the pipe open."""
    script = (
        "import subprocess, time; child = subprocess.Popen(['sleep', '600']);"
        "print(child.pid, flush=True); time.sleep(600)"
    )
    begin = time.monotonic()
    assert run(step(script, limit=2), report) == "the step did not end in 2 s and was killed"
    assert time.monotonic() - begin < 60
    pid = int(file.read_text().splitlines()[1])
    wait_until(lambda: has_ended(pid))


def test_a_step_that_ends_leaves_no_process(report: Report, file: Path) -> None:
    script = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid)"
    begin = time.monotonic()
    assert run(step(script), report) is None
    assert time.monotonic() - begin < 60
    pid = int(file.read_text().splitlines()[1])
    wait_until(lambda: has_ended(pid))


def test_steps_are_told_to_use_the_gpu(report: Report, file: Path) -> None:
    names = ("CHATJOBS_TEST_GPU", "CHATJOBS_TEST_DEVICE")
    run(step(f"import os; print([os.environ[name] for name in {names}])"), report)
    assert file.read_text().splitlines()[1] == "['1', 'cuda']"


def test_a_machine_without_a_gpu_fails_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole command: its children see no GPU, here or elsewhere."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    out = tmp_path / "report.txt"
    done = CliRunner().invoke(gpu_check.main, ["--out", str(out)])
    assert done.exit_code == 1
    text = out.read_text()
    assert "\ncommit: " in text and "\ntorch: " in text
    assert "\nthe probe ended with exit code 1: nothing else was run\n" in text
    assert "pytest" not in text


def test_a_check_that_is_terminated_ends_its_step(tmp_path: Path) -> None:
    card = tmp_path / "nvidia-smi"
    card.write_text('#!/bin/sh\necho "pid $$"\nexec sleep 600\n')
    card.chmod(0o755)
    command = [sys.executable, "-m", "bench.gpu_check", "--out", str(tmp_path / "report.txt")]
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        line = next(line for line in process.stdout if line.startswith("pid "))
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 128 + signal.SIGTERM
    wait_until(lambda: has_ended(int(line.split()[1])))
