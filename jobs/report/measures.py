"""The numbers of a run as Arrow columns: counts, totals, and the time that its workers were busy.

Everything here is computed by Arrow on whole columns. Memory: about 100 bytes a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from jobs.results.files import Results
from jobs.results.scores import KEY

MICROSECONDS = 1e6  # in a second
COLUMNS = (
    *KEY, "status", "error_type", "input_tokens", "output_tokens", "cached_tokens", "started_at",
    "finished_at", "queue_s", "ttft_s", "tpot_s", "duration_s", "worker_id",
)  # fmt: skip
TEXTS = ("status", "error_type", "worker_id")


@dataclass(frozen=True, slots=True)
class Measures:
    """The numeric columns of a run. `table`: a pyarrow.Table with COLUMNS."""

    table: Any

    @property
    def rows(self) -> int:
        return len(self.table)

    @property
    def failed(self) -> int:
        """Rows that failed or were cancelled."""
        return pc.sum(pc.not_equal(self.table["status"], "ok")).as_py() or 0

    @property
    def input_tokens(self) -> int:
        """Of all jobs; the prompt of several choices counts once."""
        return _sum(self._first_choices()["input_tokens"])

    @property
    def cached_tokens(self) -> int:
        """Input tokens that were read from a cache."""
        return _sum(self._first_choices()["cached_tokens"])

    @property
    def output_tokens(self) -> int:
        return _sum(self.table["output_tokens"])

    @property
    def errors(self) -> dict[str, int]:
        """Rows by error code, the most frequent first."""
        failed = self.table.filter(pc.not_equal(self.table["status"], "ok"))
        codes = pc.coalesce(*(failed[name].cast(pa.string()) for name in ("error_type", "status")))
        counts = {one["values"]: one["counts"] for one in codes.value_counts().to_pylist()}
        return dict(sorted(counts.items(), key=lambda one: (-one[1], one[0])))

    @property
    def workers(self) -> int:
        return len(pc.unique(self.table["worker_id"].drop_null()))

    def values(self, column: str) -> Any:
        """The values of a column that are not null and finite, as a float array. Of prompts: those
        of first choices."""
        table = self._first_choices() if column == "input_tokens" else self.table
        found = table[column].drop_null().cast(pa.float64())
        return found.filter(pc.is_finite(found)).combine_chunks()

    def span(self) -> tuple[int, int] | None:
        """The first start and the last end, in microseconds since the epoch; None if no row was
        started."""
        times = self.timed()
        if not len(times):
            return None
        return pc.min(times["start"]).as_py(), pc.max(times["end"]).as_py()

    @property
    def elapsed_seconds(self) -> float | None:
        """From the first start to the last end."""
        span = self.span()
        return None if span is None else (span[1] - span[0]) / MICROSECONDS

    @property
    def busy_seconds(self) -> float | None:
        """The time in which a worker ran at least one row, summed over workers."""
        times = self.timed()
        if not len(times):
            return None
        return sum(self._busy(times)) / MICROSECONDS

    def timed(self) -> Any:
        """A pyarrow.Table of the rows that were started: `worker`, `start` and `end` in
        microseconds, `output_tokens`."""
        known = pc.and_(self.table["started_at"].is_valid(), self.table["finished_at"].is_valid())
        rows = self.table.filter(known)
        start = rows["started_at"].cast(pa.int64())
        return pa.table(
            {
                "worker": pc.fill_null(rows["worker_id"].cast(pa.string()), ""),
                "start": start,
                "end": pc.max_element_wise(start, rows["finished_at"].cast(pa.int64())),
                "output_tokens": pc.fill_null(rows["output_tokens"], 0),
            }
        )

    @staticmethod
    def _busy(times: Any) -> Iterator[int]:
        """The microseconds of each worker: its whole time less the gaps between rows."""
        ordered = times.sort_by("start")
        for worker in pc.unique(ordered["worker"]):
            own = ordered.filter(pc.equal(ordered["worker"], worker)).combine_chunks()
            starts, ends = own["start"], own["end"]
            reached = pc.cumulative_max(ends)
            gaps = pc.max_element_wise(pc.subtract(starts[1:], reached[:-1]), 0)
            yield reached[-1].as_py() - starts[0].as_py() - (pc.sum(gaps).as_py() or 0)

    def _first_choices(self) -> Any:
        return self.table.filter(pc.equal(self.table["choice_index"], 0))


def read_measures(results: Results, run: str) -> Measures:
    """The numbers of a run."""
    batches = results.dataset(run).to_batches(columns=list(COLUMNS))
    tables = [_compact(pa.Table.from_batches([batch])) for batch in batches if batch.num_rows]
    if not tables:
        return Measures(results.table(run, COLUMNS))
    return Measures(pa.concat_tables(tables).unify_dictionaries())


def _compact(table: Any) -> Any:
    """Texts that repeat are held once."""
    for name in TEXTS:
        place = table.schema.get_field_index(name)
        table = table.set_column(place, name, table[name].dictionary_encode())
    return table


def _sum(column: Any) -> int:
    return pc.sum(column).as_py() or 0
