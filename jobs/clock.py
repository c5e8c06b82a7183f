"""A clock that never jumps: the time of day at the start of this process plus the seconds since.

Durations are differences of these times, so setting the clock of the machine changes none of them.
"""

from __future__ import annotations

import time

_BEGAN = time.time() - time.monotonic()


def now() -> float:
    """Seconds since the epoch."""
    return _BEGAN + time.monotonic()
