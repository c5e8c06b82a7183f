"""Checks everything on a GPU, and writes one report: what was found, and how fast it is.

    make gpu-check         about ten minutes; the report is gpu-check.txt

The tests compare every family, cache, sampling option, kind of draft and quantised type with the
CPU in float32; the benchmark is `bench.gpu`. Attach the report to an issue.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TextIO

import click

CARD = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv")
TESTS = ("-m", "pytest", "-q", "--tb=short", "-W", "default", "-ra", "tests/gpu")
BENCH = ("-m", "bench.gpu", "--profile")


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=Path("gpu-check.txt"))
@click.option("--seconds", default=240.0, show_default=True, help="Time limit of the benchmark.")
@click.option("--tests/--no-tests", default=True)
def main(out: Path, seconds: float, tests: bool) -> None:
    """Run the tests and the benchmark, and write what they print to a file as well."""
    commands = [CARD, (sys.executable, *BENCH, "--seconds", str(seconds))]
    if tests:
        commands.insert(1, (sys.executable, *TESTS))
    with out.open("w", encoding="utf-8") as report:
        codes = [_run(command, report) for command in commands]
    print(f"the report is {out}")
    sys.exit(max(codes))


def _run(command: tuple[str, ...], report: TextIO) -> int:
    """Print what a command prints, and write it to the report. Returns its exit code."""
    report.write(f"$ {' '.join(command)}\n")
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    except OSError as error:
        report.write(f"{error}\n")
        return 1
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        report.write(line)
    return process.wait()


if __name__ == "__main__":
    main()
