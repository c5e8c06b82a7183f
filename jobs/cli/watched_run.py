"""A run as a command executes it: its progress on stderr, why it stands still, and Ctrl-C."""

from __future__ import annotations

import gc
import re
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jobs.cli.failures import Failure, Interrupted
from jobs.cli.interrupts import interrupts_call
from jobs.cli.run_watcher import RunWatcher, Stop

if TYPE_CHECKING:
    from jobs import Client, Results
    from jobs.runs.audit import Audit
    from jobs.runs.data_set_run import DataSetRun
    from jobs.runs.retry import Redo

WINDOW_ROWS = 2000  # in Redis at once that have not ended, by default
SECRET = re.compile(r"://[^@/\s]*@")


class WatchedRun:
    """Executes one run. `models`: of its rows, as far as they are known. `total`: rows, about."""

    def __init__(
        self,
        run: DataSetRun,
        connected: Client,
        store: Results,
        models: Sequence[str],
        total: int,
        name: str = "",
        *,
        quiet: bool,
        max_error_rate: float | None = None,
        unserved: str = "",
    ) -> None:
        """`name`: before the progress, where a command shows several. `unserved`: what to do if
        nobody serves a model."""
        self._run, self._connected, self._store = run, connected, store
        self._models, self._total = tuple(models), total
        self._quiet, self._max_error_rate = quiet, max_error_rate
        self._unserved, self._name = unserved, name

    def execute(self, redo: Redo | None = None, note: str = "") -> Audit:
        """Run all rows, and count them. `redo`: see `DataSetRun.execute`. `note`: a line above the
        progress. Raises Interrupted after Ctrl-C, and Failure above the rate of errors."""
        import redis

        from jobs.cli.progress import RunProgress
        from jobs.runs.audit import Audit

        self._run.check()
        gc.freeze()  # a full collection would look at all that was imported, again and again
        stop = Stop()
        with (
            RunProgress(self._name, quiet=self._quiet) as progress,
            interrupts_call(stop.interrupt),
        ):
            watcher = RunWatcher(
                self._connected,
                self._store,
                self._run.name,
                self._models,
                progress,
                stop,
                total=self._total,
                max_error_rate=self._max_error_rate,
                unserved=self._unserved,
            )
            if note:
                progress.note(note)
            try:
                found = self._run.execute(watcher, redo)
            except KeyboardInterrupt:
                raise self._interrupted("rows in Redis go on") from None
            except redis.RedisError:  # it waits for Redis no longer
                if stop.interrupted:
                    raise self._interrupted("rows in Redis go on") from None
                raise
        if isinstance(found, Audit):
            return found
        if stop.interrupted:
            is_ours = found == "stopped"
            raise self._interrupted(
                "no row is left in Redis" if is_ours else "another process runs the others"
            )
        raise Failure(f"{stop.reason}; {_go_on()}")

    def _interrupted(self, left: str) -> Interrupted:
        written = self._run.written
        written.refresh()
        done = f"{len(written.rows):,} of about {self._total:,} rows are done"
        return Interrupted(f"interrupted; {done}, and {left}; {_go_on()}")


def _go_on() -> str:
    words = [SECRET.sub("://…@", word) for word in sys.argv[1:]]
    return f"this goes on: chatjobs {shlex.join(words)}"
