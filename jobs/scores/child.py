"""The child process that scores rows: `python -m jobs.scores.child METRIC SECONDS WAIT BYTES`.

It reads JSON arrays of rows, one per line, and writes one line for each row. Code of users and
patterns may take forever or all memory: each row has limits of CPU time and of time, and the
process one of memory that it may take besides what it has when the metric is ready.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys

from jobs.errors import InvalidRequest
from jobs.install import command_for
from jobs.scores.outcome import MAX_ERROR, Metric, Outcome, shortened
from jobs.scores.spec import Spec, parse_spec


def main() -> None:
    """Write a line that says whether the metric is ready, then score until stdin ends."""
    text, seconds, wait = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
    # Functions of users may print, read and start programs: only this file uses the pipes.
    replies, rows = _Replies(os.dup(1)), os.fdopen(os.dup(0), encoding="ascii")
    os.dup2(2, 1)
    _read_nothing()
    # The kernel ends the process if a row takes too long, also one whose parent is gone.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    sys.set_int_max_str_digits(0)  # integers of JSON have any length, and the timers bound the time
    metric = _made(parse_spec(text), replies)
    _limit_memory(int(sys.argv[4]))
    for line in rows:
        for row in json.loads(line):
            _set_timers(seconds, wait)
            reply = _scored(metric, row)
            _set_timers(0, 0)
            replies.write(reply)


class _Replies:
    """The pipe for lines to the parent. A process that a metric has forked, and that returns from
    it, ends instead of writing: each row has one reply."""

    def __init__(self, descriptor: int) -> None:
        self._pipe = os.fdopen(descriptor, "w", encoding="utf-8")
        self._owner = os.getpid()

    def write(self, line: str) -> None:
        if os.getpid() != self._owner:
            os._exit(0)
        self._pipe.write(f"{line}\n")
        self._pipe.flush()


def _read_nothing() -> None:
    """Let standard input be empty."""
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)


def _set_timers(seconds: float, wait: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, wait)


def _made(spec: Spec, replies: _Replies) -> Metric:
    try:
        metric = spec.make()
    except InvalidRequest as error:
        replies.write(json.dumps({"refused": error.message}))
        sys.exit(2)
    except ModuleNotFoundError as error:
        if spec.kind.package is None:
            raise
        message = f"{spec.name} needs the package {spec.kind.package}: {command_for('scores')}"
        replies.write(json.dumps({"refused": f"{message} ({error})"}))
        sys.exit(2)
    replies.write("{}")
    return metric


def _scored(metric: Metric, row: dict[str, object]) -> str:
    try:
        outcome = metric.score(row)
        if not isinstance(outcome, Outcome):
            raise TypeError(f"the metric returned {outcome!r}")
        return outcome.to_json()
    except (Exception, SystemExit) as error:
        return json.dumps({"error": _sentence(error)})


def _sentence(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return "the metric needs more memory than --memory allows"
    text = str(error)
    if not isinstance(error, ValueError) or not text:
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return shortened(" ".join(text.split()), MAX_ERROR) or ""


def _limit_memory(max_bytes: int) -> None:
    """Limit what the process may allocate from now on."""
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[5]) * resource.getpagesize()  # data and stack
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = used + max_bytes
    if most != resource.RLIM_INFINITY:
        limit = min(limit, most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


if __name__ == "__main__":
    main()
