"""The demo's worker: `chatjobs work` as a child process."""

from __future__ import annotations

import signal
from pathlib import Path
from types import TracebackType
from typing import Self

from jobs.child import ChildProcess
from jobs.cli.failures import Unavailable
from jobs.cli.output import echo
from worker.cli.own_command import own_command

STOP_SECONDS = 20.0
DRAFT = "demo-draft"
MAX_WORKERS = 10  # workers started before the demo gives up


class WorkerProcess:
    """A `chatjobs work` child process on the demo's Redis; `check` replaces it if it was killed.
    `model` is what it loads."""

    def __init__(self, model: str, redis_url: str, folder: Path) -> None:
        self._command = [
            own_command(),
            *("work", "--model", model, "--draft", DRAFT),
            *("--redis", redis_url, "--results", str(folder), "--quiet"),
            *("--log-format", "text"),
        ]
        self._started = 0
        self._killed = False  # by this process

    @property
    def pid(self) -> int:
        return self._child.pid

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._child.stop(STOP_SECONDS)

    def check(self) -> None:
        """Start a new worker if the last one was killed. Raises if it exited by itself."""
        code = self._child.poll()
        if code is None or self._killed:
            return
        if code >= 0 or self._started >= MAX_WORKERS:
            raise Unavailable(f"the worker exited with code {code}; its messages are above")
        name = signal.Signals(-code).name
        echo(f"the worker was killed ({name}): starting another one", err=True)
        self._child.stop(STOP_SECONDS)
        self._start()

    def kill(self) -> None:
        """End the worker at once, if it has started, and start no other one."""
        self._killed = True
        if self._started:
            self._child.stop(0)

    def _start(self) -> None:
        self._child = ChildProcess(self._command)
        self._started += 1
        echo(f"worker: process {self._child.pid}", err=True)
