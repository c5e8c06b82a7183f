"""Time until commands and imports are ready, each in a new process.

    python -m bench.start [--model model.gguf] [--rounds 7]

Imports and `chatjobs --help`: until the process ends. `chatjobs work`: until its log says that the
worker serves the model, on a private Redis, with compiled kernels and files in the system's page
cache. Seconds, medians of alternating rounds; a first round warms up.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click

from bench.harness import alternate, median, report
from jobs.embedded import EmbeddedRedis

COMMAND = str(Path(sys.executable).with_name("chatjobs"))
AIMS = {"chatjobs --help": 0.3, "chatjobs work": 3.0}  # seconds


@click.command()
@click.option("--model", default="demo", show_default=True, metavar="MODEL")
@click.option("--rounds", default=7, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=None, help="JSON file to write.")
def main(model: str, rounds: int, out: Path | None) -> None:
    """Measure the start of imports and commands."""
    python = [sys.executable, "-c"]
    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis() as server:
        options = ["--model", model, "--redis", server.url, "--results", folder, "--device", "cpu"]
        contestants: dict[str, Callable[[], float]] = {
            "import jobs": partial(_to_the_end, [*python, "import jobs"]),
            "import worker": partial(_to_the_end, [*python, "import worker"]),
            "import torch": partial(_to_the_end, [*python, "import torch"]),
            "from worker import Engine": partial(
                _to_the_end, [*python, "from worker import Engine"]
            ),
            "chatjobs --help": partial(_to_the_end, [COMMAND, "--help"]),
            "chatjobs work": partial(_to_serve, [COMMAND, "work", *options]),
        }
        figures = alternate(contestants, rounds)
    rows = [
        {"start of": name, "seconds": median(times), "aim": AIMS.get(name)}
        for name, times in figures.items()
    ]
    report(f"start, {Path(model).name}", rows, "cpu", out)


def _to_the_end(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def _to_serve(command: list[str]) -> float:
    """Until a worker serves; then it is stopped."""
    start = time.perf_counter()
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = []
        try:
            for line in process.stderr:
                said.append(line)
                if " serves " in line:
                    return time.perf_counter() - start
        finally:
            process.terminate()
            process.stderr.read()
    raise click.ClickException(f"the worker ended: {''.join(said)}")


if __name__ == "__main__":
    main()
