"""Ctrl-C: ends the command at once while it starts, raises KeyboardInterrupt in a command that has
something to undo or to say, and calls a function where code may not be interrupted at any line.

While modules are imported, a KeyboardInterrupt would end in a traceback or be lost in an extension.
One that is raised in a destructor is lost as well: Python only prints it. It is raised again.

SIGTERM: ends the first process of a container as it ends any other one.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import contextmanager, suppress

TYPE_CHECKING = False  # without `typing`: this is imported before Ctrl-C is handled
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, NoReturn

INTERRUPTED = 130  # 128 + SIGINT, as shells report it
TERMINATED = 143  # 128 + SIGTERM
AGAIN_SECONDS = 0.01  # after which a KeyboardInterrupt that was lost is raised again


def exit_on_interrupt() -> None:
    """From now on Ctrl-C ends the process, unless the process was started to ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


def exit_on_termination() -> None:
    """From now on SIGTERM ends the process, also where the kernel drops signals that have no
    handler: in the first process of a container. A worker that still loads its models would serve
    until it is killed."""
    if os.getpid() == 1 and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(TERMINATED))


@contextmanager
def interrupts_raise() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt in the block."""
    if signal.getsignal(signal.SIGINT) is not _exit:
        yield
        return
    before = sys.unraisablehook

    def raise_again(lost: Any) -> None:
        if issubclass(lost.exc_type, KeyboardInterrupt):
            _interrupt_later()
        else:
            before(lost)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.unraisablehook = raise_again
    try:
        yield
    finally:
        sys.unraisablehook = before
        signal.signal(signal.SIGINT, _exit)


@contextmanager
def interrupts_call(stop: Callable[[], bool]) -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C in the block calls `stop`, which returns False if there is nothing to stop:
    Ctrl-C then raises KeyboardInterrupt, as each further one does. `stop` may come at any line of
    the block. Yields a function that returns True once `stop` was called."""
    stopped = False

    def handle(signum: int, frame: Any) -> None:
        nonlocal stopped
        if stopped or not stop():
            signal.default_int_handler(signum, frame)
        stopped = True

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:
        yield lambda: False
        return
    signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: stopped
    finally:
        signal.signal(signal.SIGINT, before)


def _interrupt_later() -> None:
    """From a thread: here the KeyboardInterrupt would be lost again."""
    import threading

    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(AGAIN_SECONDS, signal.pthread_kill, (main, signal.SIGINT))
    timer.daemon = True
    timer.start()


def _exit(signum: int, frame: Any) -> NoReturn:
    with suppress(OSError):
        os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)
