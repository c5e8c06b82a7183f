"""The demo's worker: `chatjobs work` as a child process."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sysconfig
from pathlib import Path
from types import TracebackType
from typing import Self

import click

from jobs.cli.failures import Unavailable

MODEL = "demo"
STOP_SECONDS = 20.0
MAX_WORKERS = 10  # more deaths than this are no accident

# Waits for the end of its standard input, which comes when the demo is gone.
GUARD = 'read _; kill -9 "$1" 2>/dev/null'


class WorkerProcess:
    """A worker on the demo's Redis, replaced when it is killed."""

    def __init__(self, redis_url: str, folder: Path) -> None:
        self._command = [
            _chatjobs(),
            *("work", "--model", MODEL, "--redis", redis_url, "--results", str(folder), "--quiet"),
        ]
        self._started = 0

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._guard.kill()
        self._guard.communicate()
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def check(self) -> None:
        """Start another worker if this one was killed. Raises if it exited by itself."""
        code = self._process.poll()
        if code is None:
            return
        if code >= 0 or self._started >= MAX_WORKERS:
            raise Unavailable(f"the worker exited with code {code}; its messages are above")
        name = signal.Signals(-code).name
        click.echo(f"the worker was killed ({name}): starting another one", err=True)
        self._guard.kill()
        self._guard.communicate()
        self._start()

    def _start(self) -> None:
        # Own sessions, so that Ctrl-C reaches only this process, which then stops the worker.
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, start_new_session=True
        )
        self._guard = subprocess.Popen(
            ["sh", "-c", GUARD, "guard", str(self._process.pid)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        self._started += 1
        click.echo(f"worker: process {self._process.pid}", err=True)


def _chatjobs() -> str:
    """Return the path of the `chatjobs` command of this environment."""
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    found = shutil.which("chatjobs", path=path)
    if found is None:
        raise Unavailable("command not found: chatjobs; pip install 'chatjobs[worker]'")
    return found
