"""A child process that cannot outlive this one.

The child runs in a session of its own, so that Ctrl-C at the terminal reaches only this process,
which then stops the child. If this process dies without stopping it, for example by SIGKILL, a
guard, a small shell process, terminates the child, and kills it if it has not ended in time.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

ORPHAN_SECONDS = 2  # from SIGTERM of the guard to its SIGKILL

# Standard input of the guard is a pipe from this process: `read` returns when this process ends.
GUARD = """
read _
kill "$1" 2>/dev/null
tries=0
while kill -0 "$1" 2>/dev/null && [ "$tries" -lt "$3" ]; do sleep 0.1; tries=$((tries + 1)); done
kill -9 "$1" 2>/dev/null
[ -z "$2" ] || rm -rf "$2"
"""


class ChildProcess:
    """Runs `command` until `stop`, or until this process dies.

    `output` is what subprocess takes for stdout and stderr; by default both are inherited.
    `environment` replaces that of this process. `temporary` is a folder of the child that the guard
    removes if this process dies; `stop` leaves it to the caller. `orphan_seconds` is the time that
    the child then has after SIGTERM.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        output: int | None = None,
        environment: Mapping[str, str] | None = None,
        temporary: Path | None = None,
        orphan_seconds: float = ORPHAN_SECONDS,
    ) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
        )
        tenths = str(round(10 * orphan_seconds))
        self._guard = subprocess.Popen(
            ["sh", "-c", GUARD, "guard", str(self.pid), str(temporary or ""), tenths],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Exit code of the child, -N if signal N killed it; None while it runs."""
        return self._process.poll()

    def wait(self) -> int:
        """The exit code of the child, as `poll`, once it has ended. Blocks its thread; other
        threads may poll and stop meanwhile."""
        return self._process.wait()

    def send(self, number: int) -> None:
        """Send a signal to the child, unless it has ended."""
        self._process.send_signal(number)

    def stop(self, seconds: float) -> None:
        """Terminate the child and wait for it; kill it after `seconds`. Does nothing if it ended.

        The guard ends first: once the child is reaped, its process id may belong to another.
        """
        self._guard.kill()
        self._guard.communicate()
        self._process.terminate()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
