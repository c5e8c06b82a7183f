"""One run of a data set, from its first row to its audit. Owns the state in run.json.

`chatjobs run`, `chatjobs demo` and the judges of `chatjobs score` call it; a watcher shows the
progress.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

from redis import Redis

from jobs.data_sets.source import RowSource
from jobs.results.compact import finish_replacement
from jobs.results.files import Results
from jobs.results.run_json import VERSIONS
from jobs.runs.audit import Audit, audit
from jobs.runs.producer import Producer, Watcher
from jobs.runs.retry import Redo, remove_chosen
from jobs.runs.row_set import RowSet
from jobs.runs.run_file import RunFile
from jobs.runs.same_versions import SameVersions
from jobs.runs.written_rows import WrittenRows, read_columns
from jobs.store.producer_lease import LeaseLost, ProducerLease
from jobs.store.run_rows import RunRows

# The watcher has stopped a run: "waited" if another process runs its rows.
Stopped = Literal["stopped", "waited"]


class DataSetRun:
    """The run `name` of a data set. `configuration`: all that decides on its answers."""

    def __init__(
        self,
        redis: Redis,
        results: Results,
        name: str,
        source: RowSource,
        configuration: Mapping[str, Any],
        *,
        window: int,
        expected: int | None = None,
        lease: ProducerLease | None = None,
    ) -> None:
        """`window`: rows in Redis at once that have not ended. `expected`: samples of the whole
        run, about, for those who watch it. `lease`: on the run, of a caller
        that has it and gives it up itself."""
        self._results, self.name, self._source = results, name, source
        self._configuration, self._window = configuration, window
        self._expected = expected
        self._file = RunFile(results, name)
        self._rows = RunRows(redis, lease or ProducerLease(redis, name))
        self._releases = lease is None
        self._versions = SameVersions(redis, results, name)
        self.written = WrittenRows(results, name, source.samples)
        self.done_before = 0  # samples that were in files when the run went on

    def check(self) -> None:
        """Raise InvalidRequest if the run was made with another configuration."""
        self._file.check(self._configuration)

    def execute(self, watcher: Watcher, redo: Redo | None = None) -> Audit | Stopped:
        """Run the rows that are in no file, and count those in the files. `redo`: chooses rows in
        the files that are run again. Holds the lease on the run until run.json has the result.

        Raises InvalidRequest for another configuration, for a worker that serves another version of
        a model than has made the answers so far, for a file of the run that can't be read, and for
        a data set that can't be read to its end, when the rows before are in files, JobError if
        rows can't be enqueued, and OSError. Rows in Redis go on then.
        """
        self.check()
        chosen, begun, noted = redo is None, False, False

        def before_rows() -> None:
            nonlocal noted
            self._versions.check()
            if not noted:
                self._file.write(self._configuration, "running", expected=self._expected)
                noted = True

        def begin() -> RowSet | None:
            nonlocal chosen, begun, noted
            alone = None
            self.check()  # another process may have begun the run
            self.written.refresh()
            self.written.check()
            self._versions.restart()
            noted = False
            if self.name not in self._results.runs():
                before_rows()
            finish_replacement(self._results, self.name)
            if redo is not None and not chosen:
                again = redo(self.written)
                if len(again):
                    before_rows()
                    remove_chosen(self._results, self._rows, self.written, again)
                    alone = again
                chosen = True
            self.written.refresh()
            if not begun:
                self.done_before, begun = len(self.written.rows), True
            return alone

        producer = Producer(
            self._rows,
            self.written,
            self._source,
            watcher,
            window=self._window,
            begin=begin,
            before_rows=before_rows,
        )
        lease = self._rows.lease
        held: AbstractContextManager[object] = lease if self._releases else nullcontext()
        with held:
            while (end := producer.run()) != "waited":
                try:
                    if end == "stopped":
                        producer.confirm()
                        self._file.write(self._configuration, "interrupted")
                        return "stopped"
                    count = producer.total or 0
                    found = audit(self._results, self.name, count, self._source.samples)
                    producer.confirm()
                    facts = {"audit": found.to_dict(), **self._engine()}
                    self._file.write(self._configuration, "done", **facts)
                    return found
                except LeaseLost:  # another process may have changed the run meanwhile
                    continue
        return "waited"

    def _engine(self) -> dict[str, Any]:
        """The engine of the first row that was generated; empty if none was."""
        broken = self._results.broken(self.name)
        whole = (file for file in self._results.files(self.name) if file not in broken)
        rows = (values for file in whole for values in read_columns(file, VERSIONS))
        found = next((values for values in rows if values[1] is not None), None)
        return {} if found is None else dict(zip(VERSIONS, found, strict=True))
