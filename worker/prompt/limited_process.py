"""A child process with limits of memory and CPU time, which replies to one JSON line at a time.

For work that untrusted input may make endless: rendering templates and tokenizing long prompts.
"""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

MAX_WAIT = 60.0  # wall-clock time of one reply, in seconds
EXIT_SECONDS = 1.0  # how long a child that closed its output may take to exit


class Ended(Exception):
    """The child ended instead of replying. `overtime`: it exceeded its CPU time, or MAX_WAIT.
    `aborted`: it could not allocate memory."""

    def __init__(self, title: str, status: int | None) -> None:
        super().__init__(f"{title} ended ({status})")
        self.overtime = status is None or status == -signal.SIGPROF
        self.aborted = status == -signal.SIGABRT


class LimitedProcess:
    """Runs `python -m MODULE BYTES`, where BYTES limits its address space. Thread-safe.

    The child starts with the first request, and again after it has ended. `greeting` makes the line
    that it reads first. The module limits the CPU time of each request and dies of SIGPROF.
    """

    def __init__(
        self,
        title: str,
        module: str,
        max_bytes: int,
        greeting: Callable[[], str] | None = None,
    ) -> None:
        self._title, self._greeting = title, greeting
        self._command = [sys.executable, "-P", "-m", module, str(max_bytes)]
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the child; None if there is none."""
        process = self._process
        return None if process is None else process.pid

    def exchange(self, request: Mapping[str, Any], *, last: str = "") -> dict[str, Any]:
        """Send a request and return its reply. A reply with the key `last` is the child's last.
        Raises Ended."""
        line = json.dumps(request).encode() + b"\n"
        with self._lock:
            process = self._process
            if process is None or process.poll() is not None:
                process = self._process = self._start()
                if self._greeting is not None:
                    line = self._greeting().encode() + b"\n" + line
            reply = None
            with suppress(OSError):
                assert process.stdin is not None
                process.stdin.write(line)
                process.stdin.flush()
                reply = _read_reply(process)
            if reply is not None and last not in reply:
                return reply
            status = self._end(process, 0 if reply is not None else EXIT_SECONDS)
        if reply is None:
            raise Ended(self._title, status)
        return reply

    def close(self) -> None:
        """End the child, also while it works on a request. A later request starts another."""
        process = self._process
        if process is not None:
            process.kill()

    def _start(self) -> subprocess.Popen[bytes]:
        # The new session keeps the terminal's Ctrl-C from the child. It exits when stdin closes.
        process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        weakref.finalize(self, _kill, process)
        return process

    def _end(self, process: subprocess.Popen[bytes], seconds: float) -> int | None:
        """Wait for the child to exit, then kill it. Returns the status of its own exit."""
        self._process = None
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        status = process.returncode
        _kill(process)
        return status


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # what was not written
                pipe.close()


def _read_reply(process: subprocess.Popen[bytes]) -> dict[str, Any] | None:
    """The reply; None if the child exits or exceeds MAX_WAIT."""
    assert process.stdout is not None
    deadline = time.monotonic() + MAX_WAIT
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    line = bytearray()
    while not line.endswith(b"\n"):
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            return None
        chunk = process.stdout.read1(1 << 20)  # type: ignore[attr-defined]
        if not chunk:
            return None
        line += chunk
    reply: dict[str, Any] = json.loads(line)
    return reply
