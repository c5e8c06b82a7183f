"""Progress of a run on stderr: a bar on a terminal, otherwise a plain line every two seconds.

stdout is left alone: what is written there while a bar is shown may go to a file.
"""

from __future__ import annotations

import sys
import time
from typing import Self

from rich import progress
from rich.console import Console

from jobs.cli.output import echo, is_terminal, printable
from jobs.sizes import counted

PLAIN_LINE_SECONDS = 2.0


def show_cursor() -> None:
    """Show the cursor of a terminal again, for a command that ends while it shows a bar."""
    Console(stderr=True).show_cursor()


class RowProgress:
    """A context manager; `update` may be called at any rate. With `quiet`, nothing is printed; no
    bar is shown if `stdout_busy`, on a terminal that also shows what is written to stdout."""

    def __init__(self, total: int, *, quiet: bool = False, stdout_busy: bool = False) -> None:
        self._total, self._quiet = total, quiet
        self._console = Console(stderr=True)
        self._bar = progress.Progress(
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("rows{task.fields[speed]}"),
            progress.TimeRemainingColumn(),
            console=self._console,
            redirect_stdout=False,
            disable=quiet
            or not self._console.is_terminal
            or (stdout_busy and is_terminal(sys.stdout)),
        )
        self._task = self._bar.add_task("", total=total, speed="")
        self._started = self._last_line = time.monotonic()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        shown = printable(text, err=True)
        self._console.print(shown, markup=False, highlight=False, soft_wrap=True)

    def update(self, done: int, tokens_per_second: float) -> None:
        speed = f", {tokens_per_second:,.0f} tokens/s" if tokens_per_second else ""
        self._bar.update(self._task, completed=done, speed=speed)
        now = time.monotonic()
        if self._quiet or self._console.is_terminal or not done:
            return
        if now - self._last_line < PLAIN_LINE_SECONDS:
            return
        self._last_line = now
        left = (self._total - done) * (now - self._started) / done
        echo(f"{done}/{counted(self._total, 'row')}{speed}, {left:.0f} s left", err=True)
