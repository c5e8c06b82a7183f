"""Progress of rows or of one task on stderr: a bar on a terminal, else a plain line every two
seconds, of a run every ten.

stdout is left alone: what is written there while a bar is shown may go to a file.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import Self

from rich import progress
from rich.console import Console

from jobs.cli.output import echo, is_terminal, printable
from jobs.sizes import counted

PLAIN_LINE_SECONDS = 2.0
RUN_LINE_SECONDS = 10.0
MAX_NAME = 30  # characters before a bar
RATE_SECONDS = 30.0  # over which the speed of a run is measured


def show_cursor() -> None:
    """Show the cursor of a terminal again, for a command that ends while it shows a bar."""
    Console(stderr=True).show_cursor()


class _Progress:
    """A bar on a terminal, used as a context manager. `plain`: there is no terminal."""

    def __init__(self, *columns: progress.ProgressColumn | str, shown: bool = True) -> None:
        self._console = Console(stderr=True)
        self._plain = not self._console.is_terminal
        self._bar = progress.Progress(
            *columns,
            console=self._console,
            redirect_stdout=False,
            disable=self._plain or not shown,
        )
        self._started = self._last_line = time.monotonic()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def _line_due(self, now: float, seconds: float = PLAIN_LINE_SECONDS) -> bool:
        """True if a plain line is to be written now, instead of a bar: each so many seconds."""
        if not self._plain or now - self._last_line < seconds:
            return False
        self._last_line = now
        return True


class RowProgress(_Progress):
    """Progress of the rows of a run; `update` may be called at any rate. `name`: what is done with
    the rows, where a command shows several. With `quiet`, nothing is printed; no bar is shown if
    `stdout_busy`, on a terminal that also shows what is written to stdout."""

    def __init__(
        self, total: int, name: str = "", *, quiet: bool = False, stdout_busy: bool = False
    ) -> None:
        super().__init__(
            *_named(name),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("rows{task.fields[speed]}"),
            progress.TimeRemainingColumn(),
            shown=not quiet and not (stdout_busy and is_terminal(sys.stdout)),
        )
        self._total, self._quiet, self._label = total, quiet, _label(name)
        self._task = self._bar.add_task(_description(name), total=total, speed="")

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        shown = printable(text, err=True)
        self._console.print(shown, markup=False, highlight=False, soft_wrap=True)

    def update(self, done: int, tokens_per_second: float) -> None:
        speed = f", {tokens_per_second:,.0f} tokens/s" if tokens_per_second else ""
        self._bar.update(self._task, completed=done, speed=speed)
        now = time.monotonic()
        if self._quiet or not done or not self._line_due(now):
            return
        left = (self._total - done) * (now - self._started) / done
        rows = f"{done}/{counted(self._total, 'row')}"
        echo(f"{self._label}{rows}{speed}, {left:.0f} s left", err=True)


class RunProgress(_Progress):
    """Progress of a run; `update` may be called at any rate. `name`: what the run does, where a
    command shows several."""

    def __init__(self, name: str = "", *, quiet: bool) -> None:
        super().__init__(
            *_named(name),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("rows{task.fields[facts]}"),
            shown=not quiet,
        )
        self._quiet, self._label = quiet, _label(name)
        self._task = self._bar.add_task(_description(name), total=None, facts="")
        self._marks: deque[tuple[float, int, int]] = deque()  # time, rows and tokens

    def update(self, done: int, total: int | None, tokens: int, failed: int) -> None:
        """`done`: rows that have ended, of `total`, if that is known. `tokens`: generated."""
        now = time.monotonic()
        rows_rate, tokens_rate = self._rates(now, done, tokens)
        facts = f", {rows_rate:,.1f} rows/s" if rows_rate else ""
        facts += f", {tokens_rate:,.0f} tokens/s" if tokens_rate else ""  # of rows in Parquet
        facts += f", {failed:,} failed" if failed else ""
        if total is not None and total > done and rows_rate:
            facts += f", {duration_text((total - done) / rows_rate)} left"
        self._bar.update(self._task, completed=done, total=total, facts=facts)
        if not self._quiet and self._line_due(now, RUN_LINE_SECONDS):
            of = "" if total is None else f"/{total:,}"
            echo(f"{self._label}{done:,}{of} rows{facts}", err=True)

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        if not self._quiet:
            shown = printable(text, err=True)
            self._console.print(shown, markup=False, highlight=False, soft_wrap=True)

    def _rates(self, now: float, done: int, tokens: int) -> tuple[float, float]:
        """Rows and tokens per second, over the last RATE_SECONDS."""
        if not self._marks or now - self._marks[-1][0] >= 1.0:
            self._marks.append((now, done, tokens))
        while len(self._marks) > 2 and now - self._marks[0][0] > RATE_SECONDS:
            self._marks.popleft()
        since, rows_before, tokens_before = self._marks[0]
        seconds = max(now - since, 1.0)
        return (done - rows_before) / seconds, (tokens - tokens_before) / seconds


def _named(name: str) -> list[progress.ProgressColumn]:
    """The column before a bar: the description of its task, if there is one."""
    return [progress.TextColumn("{task.description}", markup=False)] if name else []


def _description(name: str) -> str:
    shown = name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 1]}…"
    return printable(shown, err=True)


def _label(name: str) -> str:
    """The begin of a plain line."""
    return f"{name}: " if name else ""


def duration_text(seconds: float) -> str:
    """40 s, 3 min or 2 h 05 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"


class TaskProgress(_Progress):
    """Progress of one task in percent; `update` may be called at any rate."""

    def __init__(self, task: str) -> None:
        super().__init__(
            "{task.description}",
            progress.BarColumn(),
            progress.TaskProgressColumn(),
            progress.TimeRemainingColumn(),
        )
        self._name = task
        self._task = self._bar.add_task(task)

    def update(self, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done, total=total)
        if self._line_due(time.monotonic()):
            echo(f"{self._name}: {done / total:.0%}", err=True)
