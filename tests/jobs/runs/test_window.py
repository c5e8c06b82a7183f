"""Rows leave the window when they are in a file, or when Redis has lost them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from jobs import ChatRequest, Results, ScoreRequest, keys
from jobs.errors import InvalidRequest
from jobs.runs.window import Window
from jobs.runs.written_rows import WrittenRows
from jobs.store.enqueue import Enqueued
from jobs.store.producer_lease import ProducerLease
from jobs.store.run_rows import RowJob, RowState, RunRows

QUEUE = keys.bulk_queue("m")


@pytest.fixture
def client(redis_url: str) -> Iterator[Any]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
def rows(client: Any) -> Iterator[RunRows]:
    with ProducerLease(client, "r") as lease:
        assert lease.acquire() is None
        yield RunRows(client, lease)


def enqueue(rows: RunRows, row: int, repeat: int = 0) -> RowJob:
    job: Any = {
        "run": "r",
        "row": row,
        "priority": "bulk",
        **({"repeat": repeat} if repeat else {}),
    }
    request = ChatRequest(model="m", messages=[{"role": "user", "content": "a"}], job=job)
    (found,) = rows.enqueue([request])
    assert isinstance(found, Enqueued)
    return RowJob(row, repeat, found.id, QUEUE)


def end(client: Any, job: RowJob) -> None:
    """As if its row were written."""
    name, field = keys.rows("r", job.row), keys.row_field(job.row, job.repeat)
    client.hset(name, field, client.hget(name, field)[:8])
    client.hset(f"rq:job:{job.job_id}", "status", "finished")


def test_samples_of_a_row_are_rows_of_their_own(client: Any, rows: RunRows) -> None:
    first, second = enqueue(rows, 0), enqueue(rows, 0, 1)
    assert first.job_id != second.job_id
    end(client, second)
    assert rows.states([first, second]) == [RowState.OPEN, RowState.ENDED]
    assert rows.forget([first, second]) == [False, True]
    assert rows.states([first, second]) == [RowState.OPEN, RowState.NONE]
    assert client.hkeys(keys.rows("r", 0)) == [b"0"]


def test_rows_of_one_job_end_and_leave_redis_each_for_itself(client: Any, rows: RunRows) -> None:
    items = [
        {"type": "perplexity", "text": "a b", "row": 99},
        {"type": "perplexity", "text": "a b", "row": 100},
    ]
    job: Any = {"run": "r", "priority": "bulk"}
    (found,) = rows.enqueue([ScoreRequest(model="m", items=items, job=job)])
    assert isinstance(found, Enqueued)
    both = [RowJob(row, 0, found.id, QUEUE) for row in (99, 100)]
    assert rows.states(both, check_jobs=True) == [RowState.OPEN] * 2
    assert rows.forget(both) == [False] * 2
    end(client, both[0])
    assert rows.states(both) == [RowState.ENDED, RowState.OPEN]
    assert rows.forget(both[:1]) == [True]
    assert rows.states(both, check_jobs=True) == [RowState.NONE] * 2  # the job has gone


def test_a_row_whose_job_was_deleted_leaves_the_window(
    client: Any, rows: RunRows, tmp_path: Path
) -> None:
    window = Window(rows, WrittenRows(Results(tmp_path), "r"))
    window.add(0, enqueue(rows, 0))
    lost = enqueue(rows, 1)
    window.add(1, lost)
    client.delete(f"rq:job:{lost.job_id}")
    window.poll()
    assert 0 in window and 1 not in window
    assert enqueue(rows, 1) == lost  # it may be enqueued again


def test_a_row_that_has_ended_and_is_in_no_file_is_lost_after_a_while(
    client: Any, rows: RunRows, tmp_path: Path
) -> None:
    written = WrittenRows(Results(tmp_path), "r")
    patient, impatient = Window(rows, written), Window(rows, written, lost_seconds=0.0)
    job = enqueue(rows, 0)
    end(client, job)
    for window in (patient, impatient):
        window.add(0, job)
        window.poll()
        window.poll()
    assert 0 in patient and 0 not in impatient
    assert rows.states([job]) == [RowState.NONE]
    client.xadd(keys.outbox("r"), {"row": "x"})
    end(client, enqueue(rows, 0))
    impatient.add(0, job)
    impatient.poll()
    impatient.poll()
    assert 0 in impatient  # rows wait for Parquet


def test_no_row_is_lost_while_a_file_can_not_be_read(
    client: Any, rows: RunRows, tmp_path: Path
) -> None:
    part = tmp_path / "r/samples/part-a.parquet"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"PAR1")
    window = Window(rows, WrittenRows(Results(tmp_path), "r"), lost_seconds=0.0)
    job = enqueue(rows, 0)
    end(client, job)
    window.add(0, job)
    with pytest.raises(InvalidRequest, match=r"part-a\.parquet can't be read"):
        window.poll()
    assert 0 in window and rows.states([job]) == [RowState.ENDED]
    part.unlink()
    window.poll()
    assert 0 not in window


def test_waiting_jobs_are_withdrawn_and_running_ones_are_not(
    client: Any, rows: RunRows, tmp_path: Path
) -> None:
    window = Window(rows, WrittenRows(Results(tmp_path), "r"))
    for row in range(3):
        window.add(row, enqueue(rows, row))
    running = client.lpop(f"rq:queue:{QUEUE}").decode()
    client.hset(f"rq:job:{running}", "status", "started")
    assert window.withdraw() == 2
    assert len(window) == 1 and 0 in window
    assert not client.exists(f"rq:queue:{QUEUE}")
    assert [key.decode() for key in client.keys("rq:job:*")] == [f"rq:job:{running}"]
    assert client.hlen(keys.OPEN_BYTES) == 1
