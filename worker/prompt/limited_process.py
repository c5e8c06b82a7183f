"""A child process with limits of memory and CPU time, which replies to one JSON line at a time.

For work that untrusted input may make endless: rendering templates and tokenizing long prompts.
A child that does not answer is replaced, and the new one gets the request again.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from worker.backend import MachineError
from worker.processes.activity import Activity
from worker.processes.memory_limit import address_space_advice
from worker.processes.output import output_file

logger = logging.getLogger(__name__)

MAX_WAIT = 60.0  # wall-clock time of one request, in seconds; the worker's watchdog gives 120
CHILD_STALL_SECONDS = 5.0  # a child that neither runs nor uses CPU time for so long does not answer
CHILD_POLL_SECONDS = 0.25  # between two looks at a child that works
EXIT_SECONDS = 1.0  # how long a child that closed its output may take to exit
STARTS = 2  # of children for one request: the first, and one in place of it
READ_BYTES = 1 << 20  # bytes read at once


class Ended(Exception):
    """The child was killed instead of replying. `overtime`: it exceeded its CPU time. `aborted`: it
    could not allocate memory."""

    def __init__(self, title: str, status: int | None) -> None:
        super().__init__(f"{title} ended ({status})")
        self.overtime = status == -signal.SIGPROF
        self.aborted = status == -signal.SIGABRT


class LimitedProcess:
    """Runs `python -m MODULE BYTES`, where BYTES limits its address space. Thread-safe.

    The child starts with the first request, and again after it has ended. `greeting` makes the line
    that it reads first. The module answers `limited_child.requests`, and dies of SIGPROF after one
    that takes more CPU time than it may.
    """

    def __init__(
        self,
        title: str,
        module: str,
        max_bytes: int,
        greeting: Callable[[], str] = str,
    ) -> None:
        self._title, self._greeting = title, greeting
        self._command = [sys.executable, "-P", "-m", module, str(max_bytes)]
        self._lock = threading.Lock()
        self._child: _Child | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the child; None if there is none."""
        child = self._child
        return None if child is None else child.pid

    def exchange(self, request: Mapping[str, Any], *, last: str = "") -> dict[str, Any]:
        """Send a request and return its reply. A reply with the key `last` is the child's last.

        Raises Ended if the child was killed, and MachineError if it can't be started, or if neither
        it nor the one that replaces it answers.
        """
        line = json.dumps(request).encode() + b"\n"
        deadline = time.monotonic() + MAX_WAIT
        with self._lock:
            for start in range(1, STARTS + 1):
                child, greeting = self._running()
                try:
                    reply = child.exchange(greeting + line, deadline)
                except TimeoutError as error:
                    self._child = None
                    child.end(0)
                    if start == STARTS or time.monotonic() >= deadline:
                        raise MachineError("internal", f"{self._title} {error}") from None
                    logger.warning("%s (%d) %s: replacing it", self._title, child.pid, error)
                    continue
                if reply is None or last in reply:
                    self._child = None
                    status = child.end(0 if reply else EXIT_SECONDS)
                if reply is None:
                    raise self._failure(status, child.last_words)
                return reply
        raise AssertionError("the last start returns or raises")

    def close(self) -> None:
        """End the child, also while it works on a request. A later request starts another."""
        child = self._child
        if child is not None:
            child.kill()

    def _running(self) -> tuple[_Child, bytes]:
        """The child, and what it must read before the request. Raises MachineError."""
        child = self._child
        if child is not None and child.alive:
            return child, b""
        try:
            child = self._child = _Child(self._command)
        except OSError as error:  # no memory for a process, too many processes or open files
            raise MachineError("internal", f"{self._title} can't be started: {error}") from None
        weakref.finalize(self, child.end, 0)
        greeting = self._greeting()
        return child, greeting.encode() + b"\n" if greeting else b""

    def _failure(self, status: int | None, last_words: str) -> Exception:
        """The error of a child that has ended. A child that exits by itself could not start."""
        if status is None or status < 0:
            return Ended(self._title, status)
        fact = f"{self._title} can't be started: {last_words or f'it exits with {status}'}"
        return MachineError("internal", fact + address_space_advice())


class _Child:
    """One process. Its pipes don't block, so that a child that is stopped blocks nobody."""

    def __init__(self, command: Sequence[str]) -> None:
        self._stderr = output_file()
        try:
            # The new session keeps the terminal's Ctrl-C from it. It exits when stdin closes.
            self._process = subprocess.Popen(
                command,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                start_new_session=True,
            )
        except OSError:
            self._stderr.close()
            raise
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        for pipe in (self._stdin, self._stdout):
            os.set_blocking(pipe.fileno(), False)
        self.pid = self._process.pid
        self.last_words = ""  # the last line that it wrote to stderr: of a traceback, the error

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()

    def exchange(self, lines: bytes, deadline: float) -> dict[str, Any] | None:
        """Its reply to the last line; None if it exits. Raises TimeoutError."""
        rest, reply = memoryview(lines), bytearray()
        with suppress(BrokenPipeError):
            while rest:
                self._wait_for(self._stdin, select.POLLOUT, deadline)
                rest = rest[self._stdin.write(rest) or 0 :]
        while not reply.endswith(b"\n"):
            self._wait_for(self._stdout, select.POLLIN, deadline)
            chunk = self._stdout.read(READ_BYTES)
            if not chunk:
                return None
            reply += chunk
        content: dict[str, Any] = json.loads(reply)
        return content

    def end(self, seconds: float) -> int | None:
        """Wait for it to exit, then kill it. Returns the status of its own exit."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        status = self._process.returncode
        self._process.kill()
        self._process.wait()
        self._stdin.close()
        self._stdout.close()
        if not self._stderr.closed:
            lines = self._read_stderr().splitlines()
            self.last_words = next((line.strip() for line in reversed(lines) if line.strip()), "")
            self._stderr.close()
        return status

    def _read_stderr(self) -> str:
        self._stderr.seek(max(0, os.fstat(self._stderr.fileno()).st_size - READ_BYTES))
        return self._stderr.read().decode(errors="replace")

    def _wait_for(self, pipe: Any, event: int, deadline: float) -> None:
        """Wait until a pipe is ready. Raises TimeoutError after the deadline, or as soon as the
        child has not worked for CHILD_STALL_SECONDS. These are counted in looks at it: while this
        process was suspended, the child was as well."""
        poll = select.poll()
        poll.register(pipe, event)
        idle, activity = 0.0, Activity(self.pid)
        while not poll.poll(CHILD_POLL_SECONDS * 1000):
            idle = 0.0 if activity.works() else idle + CHILD_POLL_SECONDS
            if idle >= CHILD_STALL_SECONDS:
                raise TimeoutError(
                    f"does not answer: it did not work for {CHILD_STALL_SECONDS:g} s"
                )
            if time.monotonic() >= deadline:
                raise TimeoutError(f"did not answer within {MAX_WAIT:g} s")
