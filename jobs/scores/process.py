"""Runs a metric in a child process (`jobs.scores.child`), which is replaced when a row ends it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from jobs.errors import JobError, invalid
from jobs.scores.outcome import Outcome, Row
from jobs.scores.spec import Spec

LOAD_SECONDS = 600.0  # that a metric may take until it is ready: functions may load models
SLACK_SECONDS = 5.0  # after its limit, in which the kernel ends the child
LOOK_SECONDS = 1.0  # between two looks at a child that is silent
READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a metric for a row. `seconds`: of CPU time. `wait_seconds`: of time, in which it
    may also wait. `max_bytes`: of memory."""

    seconds: float = 10.0
    max_bytes: int = 2 << 30
    wait_seconds: float = 120.0


@dataclass(frozen=True, slots=True)
class Scoring:
    """The outcome of a row, or why there is none."""

    outcome: Outcome | None = None
    error: str | None = None


class MetricProcess:
    """Scores rows by one metric, in a child that starts with the first row. Not thread-safe."""

    def __init__(self, spec: Spec, limits: Limits) -> None:
        self._spec, self._limits = spec, limits
        self._child: subprocess.Popen[bytes] | None = None
        self._unread = b""
        self._stopped = threading.Event()

    def start(self) -> None:
        """Start the child and make the metric. Raises InvalidRequest if it can't be made."""
        if self._stopped.is_set():
            raise _stopped_error()
        limits = self._limits
        self._unread = b""
        self._child = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "jobs.scores.child"),
                *(self._spec.text, str(limits.seconds), str(limits.wait_seconds)),
                str(limits.max_bytes),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # keeps the terminal's Ctrl-C from it
        )
        if self._stopped.is_set():  # `stop` has found no child
            self.close()
            raise _stopped_error()
        try:
            ready = self._reply(LOAD_SECONDS)
        except BaseException:  # Ctrl-C while the metric is loaded
            self.close()
            raise
        if ready is None:
            raise JobError("internal", f"{self._spec.text} can't be started: {self._end()}")
        if "refused" in ready:
            self.close()
            raise invalid(ready["refused"], "metric")

    def score(self, rows: Sequence[Row]) -> list[Scoring]:
        """The scoring of each row, in their order."""
        done: list[Scoring] = []
        while len(done) < len(rows):
            if self._child is None:
                self.start()
            self._send(rows[len(done) :])
            while len(done) < len(rows):
                reply = self._reply(self._limits.wait_seconds + SLACK_SECONDS)
                if reply is None:
                    done.append(Scoring(error=self._end()))
                    break
                done.append(_scoring(reply))
        return done

    def stop(self) -> None:
        """End a call of `score` on another thread, which raises JobError."""
        self._stopped.set()
        child = self._child
        if child is not None:
            child.kill()

    def close(self) -> None:
        """End the child. No other thread may use it."""
        if self._child is not None:
            _kill_group(self._child)
            self._end()

    def _send(self, rows: Sequence[Row]) -> None:
        """Write rows, which the child reads as a whole before it replies."""
        assert self._child is not None and self._child.stdin is not None
        rest = memoryview(json.dumps(list(rows)).encode() + b"\n")
        with suppress(BrokenPipeError):
            while rest:
                rest = rest[self._child.stdin.write(rest) or 0 :]

    def _reply(self, seconds: float) -> dict[str, Any] | None:
        """The next line; None if the child has ended, or does not reply in time."""
        assert self._child is not None and self._child.stdout is not None
        pipe = self._child.stdout.fileno()
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        deadline = time.monotonic() + seconds
        while b"\n" not in self._unread:
            left = max(0.0, deadline - time.monotonic())
            # Processes that the metric has started may keep the pipe of an ended child open.
            has_ended = _ends_within(self._child, 0)
            if not poll.poll(0 if has_ended else min(left, LOOK_SECONDS) * 1000):
                if not has_ended and left:
                    continue
                self._child.send_signal(signal.SIGALRM)
                return None
            chunk = os.read(pipe, READ_BYTES)
            if not chunk:
                return None
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _end(self) -> str:
        """Reap the child, and end the processes that it has started. Returns why it has ended."""
        child, self._child = self._child, None
        assert child is not None and child.stdin is not None and child.stdout is not None
        child.stdin.close()
        child.stdout.close()
        in_time = _ends_within(child, SLACK_SECONDS)
        _kill_group(child)
        status = child.wait()
        if not in_time:  # it catches SIGALRM
            status = -signal.SIGALRM
        if status == -signal.SIGPROF:
            return f"the metric took more than {self._limits.seconds:g} s of CPU time (--timeout)"
        if status == -signal.SIGALRM:
            return f"the metric did not answer within {self._limits.wait_seconds:g} s"
        if status < 0:
            return f"the process of the metric ended by {signal.Signals(-status).name}"
        return f"the process of the metric exited with {status}"


def _ends_within(child: subprocess.Popen[bytes], seconds: float) -> bool:
    """True once the child has ended. It is not reaped: its id stays that of its group."""
    deadline = time.monotonic() + seconds
    with suppress(ChildProcessError):  # `stop` has reaped it
        while os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)
    return True


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    """Kill the child, and the processes that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def _stopped_error() -> JobError:
    return JobError("cancelled", "scoring was stopped")


def _scoring(reply: dict[str, Any]) -> Scoring:
    if "error" in reply:
        return Scoring(error=reply["error"])
    return Scoring(Outcome(**reply))
