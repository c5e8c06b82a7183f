"""Tools for child processes: whether they make progress, a file for their output, and advice for
those that `ulimit -v` leaves without memory."""

from __future__ import annotations

import os
import resource
import tempfile
from pathlib import Path
from typing import IO

PROC = Path("/proc")


class Activity:
    """Looks at one process, or at a process group.

    A process works if it runs or waits for a core or a disk, or if it has used CPU time since the
    last look. One that waits for something else, or that is stopped, does not work. Where there is
    no /proc, all count as working.
    """

    def __init__(self, pid: int | None = None, *, group: int | None = None) -> None:
        self._pid, self._group = pid, group
        self._before: list[tuple[str, ...]] | None = None

    def works(self) -> bool:
        """Whether any has worked since the last look, or this is the first one."""
        states = [state for state in map(_state, self._folders()) if state is not None]
        if self._group is not None:
            states = [state for state in states if state[2] == str(self._group)]
        # Process id, CPU time of user and system: a change is also that one has started or ended.
        now = [(state[0], *state[11:13]) for state in states]
        works = not states or now != self._before or any(state[1] in "RD" for state in states)
        self._before = now
        return works

    def _folders(self) -> list[Path]:
        return [PROC / str(self._pid)] if self._pid is not None else sorted(PROC.glob("[0-9]*"))


def _state(process: Path) -> list[str] | None:
    """Process id, state, and the fields from the group on, of /proc/PID/stat."""
    try:
        text = (process / "stat").read_text(encoding="ascii", errors="replace")
    except OSError:  # it has ended
        return None
    state, _, *rest = text.rpartition(")")[2].split()
    return [process.name, state, *rest]


def output_file() -> IO[bytes]:
    """A file for the output of a process, in memory where possible: a pipe that nobody reads would
    block the process, and the disk of temporary files may be full."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("output"), "w+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


def address_space_advice() -> str:
    """What to do about a process without memory, if `ulimit -v` limits it; else empty."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return ""
    return f"; `ulimit -v` gives each process {limit >> 20} MiB: raise it"
