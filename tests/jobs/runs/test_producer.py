"""The producer of a run keeps its lease, whatever takes long."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import redis

from jobs import Results
from jobs.results.files import SAMPLES
from jobs.runs import producer
from jobs.runs.producer import Producer, Progress
from jobs.runs.source import SourceRow, Wanted
from jobs.runs.written_rows import WrittenRows
from jobs.store.run_rows import Holder, RunRows


class Finished:
    """A data set of which all rows are in files."""

    samples = 1

    def read(self, wanted: Wanted) -> Iterator[SourceRow | None]:
        assert not any(map(wanted, range(3)))
        yield from [None] * 3


class Silent:
    def update(self, progress: Progress) -> bool:
        return True

    def waits_for(self, holder: Holder) -> None:
        raise AssertionError(holder)


def test_the_lease_is_renewed_while_the_files_of_a_run_are_read(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        columns: dict[str, list[Any]] = {"row_index": [number], "choice_index": [0]}
        columns |= {"status": ["ok"], "error_type": [None], "output_tokens": [1]}
        file = tmp_path / "r" / SAMPLES / f"part-{number}.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns), file)
    monkeypatch.setattr(producer, "RENEW_SECONDS", 0.0)
    with redis.Redis.from_url(redis_url) as client:
        rows = RunRows(client, "r")
        holds: list[int] = []  # files that were read before each
        written = WrittenRows(Results(tmp_path), "r")
        hold = rows.hold

        def counted() -> Holder | None:
            holds.append(len(written.rows))
            return hold()

        monkeypatch.setattr(rows, "hold", counted)
        assert Producer(rows, written, Finished(), Silent(), window=10).run() == "done"
    assert holds[:4] == [0, 1, 2, 3]
