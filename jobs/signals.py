"""Stops a process on SIGTERM and SIGINT, whatever its threads are doing.

Python runs signal handlers on the main thread, which may be blocked, as in the start of a job. So a
thread of this module receives the signals: Python's handler in C writes each to a socket. While
foreign code blocks Python, no thread reads it: a worker's lease keeper ends such a process.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from types import TracebackType
from typing import Any, Protocol, Self

logger = logging.getLogger(__name__)

SIGNALS: tuple[int, ...] = (signal.SIGTERM, signal.SIGINT)
ABORT_SECONDS = 3.0  # from the second signal to the end of the process, at most
EXIT_ABORTED = 1


class Stoppable(Protocol):
    """The interface of a process that signals stop."""

    aborted: bool

    def request_stop(self) -> None:
        """First call: end after a grace period. Second: set `aborted` and end now."""


class StopSignals:
    """A context in which the signals stop `target`. If the process is still in it some seconds
    after the second signal, it ends without clean-up, and logs `left`: what becomes of its work.
    Enter on the main thread."""

    def __init__(self, target: Stoppable, left: str) -> None:
        self._target, self._left_work = target, left
        self._left = threading.Event()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._fd_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in SIGNALS:
            self._before[number] = signal.signal(number, lambda *_: None)
        self._thread = threading.Thread(target=self._loop, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._left.set()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._fd_before)
        self._writer.close()
        self._thread.join()
        self._reader.close()

    def _loop(self) -> None:
        while received := self._reader.recv(1):
            if received[0] not in SIGNALS:
                continue
            self._target.request_stop()
            if self._target.aborted and not self._left.wait(ABORT_SECONDS):
                logger.warning(
                    "the process did not stop within %g s: %s", ABORT_SECONDS, self._left_work
                )
                os._exit(EXIT_ABORTED)
