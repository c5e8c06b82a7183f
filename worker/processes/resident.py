"""The memory of this process."""

from __future__ import annotations

import os
from pathlib import Path

STATM = Path("/proc/self/statm")


def anonymous_bytes() -> int:
    """The resident set without the pages of mapped files; 0 where there is no /proc."""
    try:
        _, resident, shared = STATM.read_text().split()[:3]
    except OSError:
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """The resident set (RSS), with the pages of mapped files; 0 where there is no /proc."""
    try:
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
