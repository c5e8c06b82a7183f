"""`chatjobs submit --wait`: waits for the submitted jobs and prints their outcomes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jobs.cli.output import echo, print_json
from jobs.cli.printing import call_text
from jobs.cli.progress import RowProgress
from jobs.cli.table import Column, free_text, number, print_table
from jobs.cli.waiting import WaitNotice
from jobs.errors import JobError

if TYPE_CHECKING:
    from jobs import ChatCompletion, Job
    from jobs.store.connection.protocol import Connection


@dataclass(frozen=True, slots=True)
class Submitted:
    """A job and the row that it is from."""

    number: int
    job: Job
    custom_id: str | None
    run: str
    existed_before: bool  # its job was in Redis already
    ended_before: bool  # its row was submitted before, and the job has left Redis

    def facts(self, unit: str) -> dict[str, Any]:
        """Return what is known before the job has ended."""
        return {"id": self.job.id, unit: self.number, "custom_id": self.custom_id}


class Outcomes:
    """The outcomes of jobs, in the order of their rows."""

    def __init__(self, submitted: list[Submitted], unit: str, *, as_json: bool) -> None:
        self._submitted, self._unit, self._as_json = submitted, unit, as_json
        self._table: list[tuple[str, ...]] = []
        self._done = self._failed = 0

    def wait(self, connection: Connection, *, quiet: bool) -> int:
        """Wait for all jobs and print their outcomes: JSON at once, the table at the end. Returns
        how many have no completion."""
        with (
            RowProgress(len(self._submitted), quiet=quiet, stdout_busy=self._as_json) as progress,
            WaitNotice(connection, quiet=quiet, write=progress.note) as notice,
        ):
            for one in self._submitted:
                if one.ended_before:
                    self._add_done(one)
                else:
                    notice.watch(one.job)
                    self._wait_for(one)
                self._done += 1
                progress.update(self._done, 0)
        if not self._as_json:
            self._print_table()
        return self._failed

    def print_rest(self) -> int:
        """Print the ids of the jobs that were not waited for. Returns their number."""
        rest = self._submitted[self._done :]
        for one in rest:
            if self._as_json:
                print_json(one.facts(self._unit))
            else:
                echo(one.job.id)
        return len(rest)

    def _wait_for(self, one: Submitted) -> None:
        try:
            self._add(one, one.job.result())
        except JobError as error:
            self._failed += 1
            self._add(one, error)

    def _add_done(self, one: Submitted) -> None:
        """Redis no longer has the outcome of a job that ended before."""
        if self._as_json:
            rest = {"status": "done", "completion": None, "error": None}
            print_json(one.facts(self._unit) | rest)
        else:
            text = f"done before; its row is in run {one.run}"
            self._table.append((str(one.number), one.custom_id or "", one.job.id, "done", "", text))

    def _add(self, one: Submitted, outcome: ChatCompletion | JobError) -> None:
        failed = isinstance(outcome, JobError)
        status = "finished"
        if isinstance(outcome, JobError):
            status = "cancelled" if outcome.code == "cancelled" else "failed"
        if self._as_json:
            content = outcome.to_dict()
            print_json(
                one.facts(self._unit)
                | {"status": status, "completion": None if failed else content}
                | {"error": content if failed else None}
            )
            return
        if isinstance(outcome, JobError):
            tokens, text = "", outcome.message
        else:
            tokens = str(outcome.usage.completion_tokens) if outcome.usage else ""
            calls = outcome.choices[0].message.tool_calls or ()
            text = outcome.text or "; ".join(map(call_text, calls))
        self._table.append((str(one.number), one.custom_id or "", one.job.id, status, tokens, text))

    def _print_table(self) -> None:
        columns: list[Column | str] = [number(self._unit), "custom_id", "job", "status"]
        columns += [number("tokens"), free_text("answer")]
        rows: list[tuple[str, ...]] = self._table
        if not any(custom_id for _, custom_id, *_ in rows):
            del columns[1]
            rows = [(line, *rest) for line, _, *rest in rows]
        print_table(columns, rows)
