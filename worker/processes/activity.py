"""Tells whether a child process, or a group of them, makes progress."""

from __future__ import annotations

from pathlib import Path

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
        self.stopped = False  # at the last look, by a signal

    def works(self) -> bool:
        """True if any process has worked since the last look, or if this is the first look."""
        states = [state for state in map(_state, self._folders()) if state is not None]
        if self._group is not None:
            states = [state for state in states if state[2] == str(self._group)]
        # Process id, CPU time of user and system: a change is also that one has started or ended.
        now = [(state[0], *state[11:13]) for state in states]
        works = not states or now != self._before or any(state[1] in "RD" for state in states)
        self._before = now
        self.stopped = bool(states) and all(state[1] == "T" for state in states)
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
