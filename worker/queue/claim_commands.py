"""The commands with which an operator stops the claims of a worker for a while: pause, resume and
drain. Models stay loaded, and running jobs go on.
"""

from __future__ import annotations

from collections.abc import Mapping

from worker.queue.admission import Admission
from worker.queue.attempts import Attempts
from worker.queue.operator_commands import Facts, Handler, Task

PAUSED, DRAINED = "paused by an operator", "drained by an operator"


class ClaimCommands:
    """Used by the loop's thread. Each command ends with the `state` of the worker (claiming,
    paused, draining or drained), the `reason` for which it claims no jobs, and the number of jobs
    that are `running`."""

    def __init__(self, admission: Admission, attempts: Attempts) -> None:
        self._admission, self._attempts = admission, attempts

    @property
    def handlers(self) -> Mapping[str, Handler]:
        return {"pause": self._pause, "resume": self._resume, "drain": self._drain}

    def _pause(self, args: Facts) -> Task:
        self._admission.hold(PAUSED)
        yield from ()
        return self._facts()

    def _resume(self, args: Facts) -> Task:
        self._admission.release()
        yield from ()
        return self._facts()

    def _drain(self, args: Facts) -> Task:
        """Ends when no job is running, or with another state if the worker was resumed."""
        self._admission.hold(DRAINED)
        said = -1
        while (running := len(self._attempts)) and self._admission.held == DRAINED:
            yield None if running == said else self._facts()
            said = running
        return self._facts()

    def _facts(self) -> Facts:
        reason, running = self._admission.pause, len(self._attempts)
        state = "paused" if reason else "claiming"
        if reason == DRAINED:
            state = "draining" if running else "drained"
        return {"state": state, "reason": reason, "running": running}
