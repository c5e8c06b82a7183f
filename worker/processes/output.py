"""The file that takes what a child process writes."""

from __future__ import annotations

import os
import tempfile
from typing import IO


def output_file() -> IO[bytes]:
    """A file for the output of a process, in memory where possible: a pipe that nobody reads would
    block the process, and the disk of temporary files may be full."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("output"), "w+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)
