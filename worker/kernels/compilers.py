"""Runs compilers: several at once, limited in time, and never longer than this process.

All are in one process group, with the processes that they start. A guard, a small shell process
that leads the group, kills it when this process ends, whatever ends it.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from worker.processes.activity import Activity
from worker.processes.output import output_file

logger = logging.getLogger(__name__)

COMPILER_STALL_SECONDS = 60.0  # compilers that neither run nor use CPU time for so long hang
MAX_COMPILE_SECONDS = 1200.0  # for the commands of one call: a busy machine may need minutes
NOTICE_SECONDS = 3.0  # after which the log says what takes so long
END_POLL_SECONDS = 0.02  # between two looks at whether commands have ended
ACTIVITY_POLL_SECONDS = 1.0  # between two looks at whether they work
# Standard input of the guard is a pipe from this process: `read` returns when this process ends.
GUARD = "read _; kill -KILL 0"


class CannotBuild(Exception):
    """The kernels can't be compiled. The message is a clause of a sentence."""


class CompilerFailed(CannotBuild):
    """A compiler has ended with an error."""


class UnknownFlags(CannotBuild):
    """The compiler does not know the instructions of the CPU."""


def run(
    commands: Sequence[Sequence[str]], folder: Path | None = None, notice: str = ""
) -> list[str]:
    """Run the commands in this order, at most one per core at a time, and return what each has
    printed. `folder`: for their temporary files. `notice` is logged if they take long.

    Raises CannotBuild if one fails or all hang, and OSError if one can't be started.
    """
    waiting, started, running = list(commands), list[_Command](), list[_Command]()
    with ExitStack() as ended:
        ended.callback(_collect, started)  # after the group's end
        group = ended.enter_context(_group())
        watch = _Watch(group, notice)
        while waiting or running:
            while waiting and len(running) < _cores():
                output = ended.enter_context(output_file())
                running.append(_Command(waiting.pop(0), group, folder, output))
                started.append(running[-1])
            time.sleep(END_POLL_SECONDS)
            running = [one for one in running if one.runs()]
            watch.look(started[-1].name)
        return [one.output() for one in started]


class _Command:
    """A command that runs, or has run."""

    def __init__(
        self, words: Sequence[str], group: int, folder: Path | None, output: IO[bytes]
    ) -> None:
        self.name = words[0]
        self._output = output
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "LC_ALL": "C"} | ({"TMPDIR": str(folder)} if folder else {}),
            process_group=group,
        )

    def runs(self) -> bool:
        """True while it runs. Raises CompilerFailed."""
        status = self._process.poll()
        if status:
            lines = self.output().splitlines()
            causes = [line for line in lines if "No space left" in line or "rror" in line]
            fact = next(iter(causes), f"status {status}, and no message")
            raise CompilerFailed(f"{self.name} failed ({fact.strip()})")
        return status is None

    def wait(self) -> None:
        self._process.wait()

    def output(self) -> str:
        self._output.seek(0)
        return self._output.read().decode(errors="replace")


def _collect(commands: Sequence[_Command]) -> None:
    """Wait for processes that have ended or were killed."""
    for command in commands:
        command.wait()


class _Watch:
    """Says what takes so long, and finds out that it hangs."""

    def __init__(self, group: int, notice: str) -> None:
        self._notice, self._activity = notice, Activity(group=group)
        self._begin = self._looked = time.monotonic()
        self._idle = 0.0  # seconds, counted in looks: this process may have been suspended

    def look(self, name: str) -> None:
        """Raises CannotBuild. `name`: of the command that was started last."""
        now = time.monotonic()
        if self._notice and now - self._begin >= NOTICE_SECONDS:
            logger.warning(self._notice)
            self._notice = ""
        if now - self._begin >= MAX_COMPILE_SECONDS:
            raise CannotBuild(f"{name} took more than {MAX_COMPILE_SECONDS:.0f} s")
        if now - self._looked < ACTIVITY_POLL_SECONDS:
            return
        self._looked = now
        self._idle = 0.0 if self._activity.works() else self._idle + ACTIVITY_POLL_SECONDS
        if self._idle >= COMPILER_STALL_SECONDS:
            raise CannotBuild(f"{name} hangs: it did not work for {COMPILER_STALL_SECONDS:.0f} s")


@contextmanager
def _group() -> Iterator[int]:
    """A process group that is killed at the end, and also if this process ends."""
    guard = subprocess.Popen(
        ["sh", "-c", GUARD],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        process_group=0,
    )
    try:
        yield guard.pid
    finally:
        with suppress(ProcessLookupError):
            os.killpg(guard.pid, signal.SIGKILL)
        guard.communicate()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
