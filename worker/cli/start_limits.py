"""Limits of this process under which no model can start: memory and threads.

Below them imports fail somewhere inside libraries, or the system kills the process. The numbers are
what torch and the bundled model took, without a GPU; other models need more, which the load says.
"""

from __future__ import annotations

import resource
import threading
from contextlib import suppress
from pathlib import Path

from jobs.cli.failures import NO_THREAD, more_threads

ADDRESS_BYTES = 1 << 30  # 0.9 GiB were taken
DATA_BYTES = 512 << 20  # 0.4 GiB
RESIDENT_BYTES = 384 << 20  # 0.34 GiB
THREADS = 16  # of a worker, without those of a batch's arithmetic
# Of the container or the service: control groups of version 2 and 1.
CGROUPS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def start_fault() -> str:
    """Return which limit is too low to start a model, and what to do; "" if none is."""
    limits = (
        ("-v", "address space", resource.RLIMIT_AS, ADDRESS_BYTES),
        ("-d", "data", resource.RLIMIT_DATA, DATA_BYTES),
    )
    for option, what, kind, need in limits:
        given, _ = resource.getrlimit(kind)
        if given != resource.RLIM_INFINITY and given < need:
            return (
                f"`ulimit {option}` gives this process {given >> 20} MiB of {what}, and the "
                f"smallest model needs {need >> 20} MiB: raise it (ulimit {option} unlimited)"
            )
    for file in CGROUPS:
        with suppress(OSError, ValueError):  # "max": no limit
            given = int(file.read_text())
            if given < RESIDENT_BYTES:
                return (
                    f"the container or service has {given >> 20} MiB of memory ({file}), and the "
                    f"smallest model needs {RESIDENT_BYTES >> 20} MiB: raise its limit (docker run "
                    "--memory, MemoryMax of systemd)"
                )
    return _thread_fault()


def _thread_fault() -> str:
    """Start as many threads as a worker has, and end them."""
    ended, started = threading.Event(), 0
    try:
        for _ in range(THREADS):
            threading.Thread(target=ended.wait, daemon=True).start()
            started += 1
    except RuntimeError:
        return f"{NO_THREAD} than {started} more, and a model needs {THREADS}: {more_threads()}"
    finally:
        ended.set()
    return ""
