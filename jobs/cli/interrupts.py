"""Ctrl-C: ends the command at once while it starts, and raises KeyboardInterrupt in a command that
has something to undo or to say.

While modules are imported, a KeyboardInterrupt would end in a traceback or be lost in an extension.
"""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager, suppress

TYPE_CHECKING = False  # without `typing`: this is imported before Ctrl-C is handled
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, NoReturn

INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def exit_on_interrupt() -> None:
    """From now on Ctrl-C ends the process, unless the process was started to ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


@contextmanager
def interrupts_raise() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt in the block."""
    if signal.getsignal(signal.SIGINT) is not _exit:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, _exit)


def _exit(signum: int, frame: Any) -> NoReturn:
    with suppress(OSError):
        os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)
