"""Conditions that become true in another thread or process: tests wait for these, on machines of
any speed, instead of for a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATIENCE = 180.0  # seconds after which a wait fails


def wait_until(condition: Callable[[], Any], failure: str = "") -> None:
    """Looks take at most a fifth of the time: those that run a command take much of a core."""
    deadline = time.monotonic() + PATIENCE
    begin = time.monotonic()
    while not condition():
        end = time.monotonic()
        assert end < deadline, failure or "the condition did not become true"
        time.sleep(min(1.0, max(0.02, 4 * (end - begin))))
        begin = time.monotonic()


def has_ended(pid: int) -> bool:
    """True for a zombie as well: in a container nobody may reap orphans."""
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # it is gone, or goes while this reads
        return True
