"""The child's side of `limited_process`: one JSON request per line, each with a limit of CPU time.

Imports little, since each child starts with it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any


def requests() -> Iterator[dict[str, Any]]:
    """The requests, until the worker has ended. The kernel kills this process by SIGPROF if one
    takes more than its `seconds` of CPU time before its reply."""
    for line in sys.stdin.buffer:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])
        yield request


def send(reply: str) -> None:
    """Send a reply, in JSON without line breaks, and stop the time. Ends the process if the worker
    has ended."""
    signal.setitimer(signal.ITIMER_PROF, 0)
    try:
        sys.stdout.write(reply + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        os._exit(1)
