"""The time of day that never jumps: what it was when this process began, and what has passed since.

Durations are differences of these times, so setting the clock of the machine changes none of them.
"""

from __future__ import annotations

import time

_BEGAN = time.time() - time.monotonic()


def now() -> float:
    """Seconds since the epoch."""
    return _BEGAN + time.monotonic()
