"""Fixtures that run the command line: in-process, or as a child process with pipes."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from click.testing import CliRunner, Result

from jobs import JobError
from jobs.cli import build, main
from jobs.operations import rows_of
from jobs.results.files import table_of, write_part
from jobs.results.outbox import Status, outbox_entry
from jobs.results.run_json import RunJson
from tests.worker.site import Site

if TYPE_CHECKING:
    from tests.cli.terminal import Terminal

COMMAND = Path(sys.executable).parent / "chatjobs"
UNREACHABLE = "redis://127.0.0.1:1/0"

Run = Callable[..., Result]
Spawn = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run("status", "--json", input=…)`; without --redis no Redis is reachable."""
    monkeypatch.setenv("CHATJOBS_REDIS_URL", UNREACHABLE)

    def invoke(*words: str, input: str | bytes | None = None) -> Result:
        with warnings.catch_warnings():
            warnings.simplefilter("default")  # as in a process of its own
            return CliRunner().invoke(build(), words, input=input)

    return invoke


@pytest.fixture
def site(redis_url: str, tmp_path: Path) -> Iterator[Site]:
    """Workers on the test's Redis, which write to a folder of the test."""
    site = Site(redis_url, tmp_path / "results")
    yield site
    site.close()


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """`spawn("chat", …)`: a child process with pipes, which are closed after the test."""
    with ExitStack() as started:

        def start(*words: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [COMMAND, *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            started.callback(_end, process)
            return process

        yield start


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


@pytest.fixture
def finished_run(tmp_path: Path) -> Path:
    """A results folder with one run `r1`: two completions and one error."""
    request = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
    completion = {"choices": [{"index": 0, "message": {"content": "ho"}, "finish_reason": "stop"}]}
    rows = []
    states: list[Status] = ["ok", "ok", "error"]
    for number, status in enumerate(states):
        entry = outbox_entry(
            f"job-{number}",
            {**request, "job": {"run": "r1", "row": number}},
            status,
            operation="chat",
            attempt=1,
            completion=completion if status == "ok" else None,
            error=JobError("timeout", "too slow").to_dict() if status == "error" else None,
            prompt_token_ids=[1, 2, 3],
            output_token_ids=[[4, 5]] if status == "ok" else [],
            finished_at=1.0,
        )
        rows += rows_of(entry)
    write_part(tmp_path / "r1/_tmp/a", tmp_path / "r1/samples/part-a.parquet", table_of(rows))
    RunJson({}).write(tmp_path / "r1")
    return tmp_path


@pytest.fixture
def opened() -> Iterator[list[Terminal]]:
    """Terminals that are closed after the test."""
    terminals: list[Terminal] = []
    yield terminals
    for terminal in terminals:
        terminal.close()


class Shown(NamedTuple):
    """The output of a command, as a terminal or a pipe of an encoding gets it."""

    code: int
    out: str
    err: str


class Stream(io.TextIOWrapper):
    """stdout or stderr of a command: a pipe or a terminal."""

    def __init__(self, encoding: str, terminal: bool) -> None:
        self.bytes = io.BytesIO()
        super().__init__(self.bytes, encoding=encoding, errors="strict", write_through=True)
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


Show = Callable[..., Shown]


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch) -> Iterator[Show]:
    """`show("status", terminal=True, encoding="latin-1", columns=80)`: the whole command, in this
    process, with these streams. `piped`: stdout is a pipe even so."""
    monkeypatch.setenv("CHATJOBS_REDIS_URL", UNREACHABLE)
    monkeypatch.setenv("TERM", "xterm")
    before = signal.getsignal(signal.SIGINT)

    def invoke(
        *words: str,
        terminal: bool = False,
        encoding: str = "utf-8",
        columns: int = 80,
        piped: bool = False,
    ) -> Shown:
        out, err = Stream(encoding, terminal and not piped), Stream(encoding, terminal)
        with monkeypatch.context() as patch:
            patch.setenv("COLUMNS", str(columns))
            patch.setattr(sys, "argv", ["chatjobs", *words])
            patch.setattr(sys, "stdout", out)
            patch.setattr(sys, "stderr", err)
            with pytest.raises(SystemExit) as ended, warnings.catch_warnings():
                warnings.simplefilter("default")
                main()
        code = ended.value.code
        assert isinstance(code, int)
        return Shown(code, *(one.bytes.getvalue().decode(encoding) for one in (out, err)))

    yield invoke
    signal.signal(signal.SIGINT, before)
