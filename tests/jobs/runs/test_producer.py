"""The producer of a run takes little memory, and of Redis little as well."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import redis

from jobs import Results
from jobs.data_sets.data_set import DataSet
from jobs.data_sets.requests import Overrides
from jobs.results.files import SAMPLES
from jobs.runs import written_rows
from jobs.runs.producer import Producer, Progress
from jobs.runs.written_rows import WrittenRows
from jobs.store.producer_lease import Holder, ProducerLease
from jobs.store.run_rows import RunRows


def write_part(folder: Path, name: str, rows: range) -> None:
    """A file of a run `r`, with the columns that a producer reads."""
    count = len(rows)
    columns: dict[str, list[Any]] = {"row_index": [*rows], "choice_index": [0] * count}
    columns |= {"status": ["ok"] * count, "error_type": [None] * count}
    columns |= {"output_tokens": [1] * count}
    file = folder / "r" / SAMPLES / name
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), file)


class Silent:
    def update(self, progress: Progress) -> bool:
        return True

    def waits_for(self, holder: Holder) -> None:
        raise AssertionError(holder)


class Recording(Silent):
    """Writes `rows` when the first one is enqueued."""

    def __init__(self, folder: Path, rows: range) -> None:
        self._folder, self._rows = folder, rows

    def update(self, progress: Progress) -> bool:
        if progress.running and self._rows:
            write_part(self._folder, "part-1.parquet", self._rows)
            self._rows = range(0)
        return True


def test_the_memory_of_a_producer_does_not_grow_with_the_data_set(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(written_rows, "BATCH_ROWS", 256)

    def peak(count: int) -> int:
        """Bytes that Python allocates while a run goes on that lacks its last row."""
        data = tmp_path / f"{count}.jsonl"
        data.write_text('{"prompt": "What is 1 + 1?"}\n' * count)
        results = tmp_path / f"of-{count}"
        write_part(results, "part-0.parquet", range(count - 1))
        overrides = Overrides(model="m", run="r", priority="bulk")
        with redis.Redis.from_url(redis_url) as client, DataSet([data], overrides) as source:
            written = WrittenRows(Results(results), "r")
            watcher = Recording(results, range(count - 1, count))
            tracemalloc.start()
            with ProducerLease(client, "r") as lease:
                made = Producer(RunRows(client, lease), written, source, watcher, window=100)
                assert made.run() == "done"
            found = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            client.flushdb()
        return found

    peak(100)  # imports
    few, many = peak(1000), peak(5000)
    assert many < few + 50_000  # ten bytes for each row more
