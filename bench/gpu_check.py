"""Checks everything on a GPU, and writes one report: what was found, and how fast it is.

    make gpu-check         downloads 3 GB into .venv at first, then takes about ten minutes; the
                           report is gpu-check.txt

`bench.gpu_probe` begins: where it finds no GPU that can be used, nothing else runs. The tests
compare every family, cache, sampling option, kind of draft and quantised type with the CPU in
float32; the benchmark is `bench.gpu`. Attach the report to an issue.

A step that exceeds its limit is killed with all processes that it started: a call of CUDA or NCCL
that hangs ends by nothing else.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import TextIO

import click

CARD = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv")
PROBE = ("-m", "bench.gpu_probe")
# pytest-timeout's signals are not handled while the main thread is in a call of CUDA. Its thread
# ends the run without a summary, so each test is named when it ends.
TESTS = (
    *("-m", "pytest", "-v", "--tb=short", "-W", "default", "-ra", "--maxfail=20"),
    *("-o", "timeout_method=thread", "tests/gpu"),
)
BENCH = ("-m", "bench.gpu", "--device", "cuda", "--profile")
# Tests hide GPUs unless the first one is set.
ENVIRONMENT = {"CHATJOBS_TEST_GPU": "1", "CHATJOBS_TEST_DEVICE": "cuda", "PYTHONUNBUFFERED": "1"}
LAST_WORDS = 10.0  # seconds for the output of processes that are killed


@dataclass(frozen=True)
class Step:
    """A command, and the seconds after which it is killed."""

    name: str
    command: tuple[str, ...]
    limit: float


class Report:
    """Lines for the terminal and a file, each one at once."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, line: str) -> None:
        self._file.write(f"{line}\n")
        self._file.flush()
        with suppress(BrokenPipeError):  # the file still gets the rest
            print(line, flush=True)


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=Path("gpu-check.txt"))
@click.option("--seconds", default=240.0, show_default=True, help="Time limit of the benchmark.")
@click.option("--tests/--no-tests", default=True)
def main(out: Path, seconds: float, tests: bool) -> None:
    """Run the tests and the benchmark, and write what they print to a file as well."""
    python = sys.executable
    probe = [Step("nvidia-smi", CARD, 60), Step("the probe", (python, *PROBE), 300)]
    # The benchmark begins nothing after its seconds, but ends what it has begun.
    bench = (python, *BENCH, "--seconds", str(seconds))
    steps = [Step("the benchmark", bench, seconds + 600)]
    if tests:
        steps.insert(0, Step("the tests", (python, *TESTS), 2400))
    with out.open("w", encoding="utf-8") as file:
        well = check(probe, steps, Report(file))
    print(f"the report is {out}")
    sys.exit(0 if well else 1)


def check(probe: Iterable[Step], steps: Iterable[Step], report: Report) -> bool:
    """Run the steps, if the last one of the probe ended well. True if all of them did, too."""
    ends = [run(step, report) for step in probe]
    if ends[-1] is not None:
        report.write(f"{ends[-1]}: nothing else was run")
        return False
    problems = [end for end in [run(step, report) for step in steps] if end is not None]
    for problem in problems:
        report.write(problem)
    if not problems:
        report.write("the tests and the benchmark ended well")
    return not problems


def run(step: Step, report: Report) -> str | None:
    """Write what a step prints. Returns how it failed; None if it did not."""
    report.write(f"$ {' '.join(step.command)}")
    try:
        process = subprocess.Popen(
            step.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            env={**os.environ, **ENVIRONMENT},
            start_new_session=True,
        )
    except OSError as error:
        report.write(str(error))
        return f"{step.name} did not start"
    assert process.stdout is not None
    reader = Thread(target=_copy, args=(process.stdout, report), daemon=True)
    try:  # from before its first line on: a signal may end this process then
        reader.start()
        code = process.wait(step.limit)
    except subprocess.TimeoutExpired:
        failure = f"{step.name} did not end in {step.limit:g} s and was killed"
    else:
        if code == 0:
            return None
        how = f"exit code {code}" if code > 0 else f"signal {-code}"
        failure = f"{step.name} ended with {how}"
    finally:  # what it has started may be running still, and keeps the pipe open
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        reader.join(LAST_WORDS)
    with suppress(subprocess.TimeoutExpired):  # a process in a call of the driver may not even end
        process.wait(LAST_WORDS)
    report.write(failure)
    return failure


def _copy(output: TextIO, report: Report) -> None:
    for line in output:
        report.write(line.rstrip("\n"))


def _exit(number: int, frame: object) -> None:
    """End the running step, too: it is in a process group of its own."""
    sys.exit(128 + number)


if __name__ == "__main__":
    for one in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(one) is signal.SIG_DFL:
            signal.signal(one, _exit)
    main()
