"""Progress of one task on stderr: a bar on a terminal, otherwise a plain line every two seconds."""

from __future__ import annotations

import time
from typing import Self

from rich import progress
from rich.console import Console

from jobs.cli.output import echo

PLAIN_LINE_SECONDS = 2.0


class ShareProgress:
    """A context manager; `update` may be called at any rate."""

    def __init__(self, task: str) -> None:
        self._name = task
        console = Console(stderr=True)
        self._plain = not console.is_terminal
        self._bar = progress.Progress(
            "{task.description}",
            progress.BarColumn(),
            progress.TaskProgressColumn(),
            progress.TimeRemainingColumn(),
            console=console,
            redirect_stdout=False,
            disable=self._plain,
        )
        self._task = self._bar.add_task(task)
        self._last_line = time.monotonic()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done, total=total)
        now = time.monotonic()
        if self._plain and now - self._last_line >= PLAIN_LINE_SECONDS:
            self._last_line = now
            echo(f"{self._name}: {done / total:.0%}", err=True)
