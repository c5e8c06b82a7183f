"""The handle to a run: its jobs in Redis, its rows in Parquet, from any process."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from jobs import AsyncClient, Client, JobError, RunStatus, WaitTimeout, keys
from jobs.embedded import EmbeddedRedis
from jobs.results.files import write_scores
from jobs.results.scores import SCORES_SCHEMA
from jobs.store import find_jobs
from jobs.store.connection.async_driver import AsyncConnection
from jobs.store.connection.sync_driver import SyncConnection
from tests.jobs.conftest import StepwiseWorker
from tests.jobs.scores.runs import answers, make_run
from tests.waiting import PATIENCE

MESSAGES = [{"role": "user", "content": "hi"}]


def submit(client: Client, name: str, run: str = "r", **options: Any) -> str:
    client.serving = None
    job = {"id": name, "run": run, **options}
    request: Any = {"model": "demo", "messages": MESSAGES, "job": job}
    return str(client.submit(request).id)


def test_the_status_counts_jobs_and_rows(
    client: Client, worker: StepwiseWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(find_jobs, "PAGE", 2)
    for number in range(5):
        submit(client, f"waits{number}", priority="bulk", tenant="t" if number else None)
    submit(client, "later", delay=1000)
    submit(client, "foreign", run="other")
    worker.start(submit(client, "runs"))
    worker.start(submit(client, "ends"))
    worker.finish("ends", "x")
    client.redis.xadd(keys.outbox("r"), {"row": "{}"})
    run = client.run("r", tmp_path)
    assert run.status() == RunStatus(6, 1, 1, producing=False, rows=0, failed=0)
    make_run(tmp_path, answers(("a", "a"), (None, "b"), ("c", "c")), "r")
    client.redis.set(keys.producer("r"), "a process")
    assert run.status() == RunStatus(6, 1, 1, producing=True, rows=3, failed=1)
    assert not run.status().over
    assert client.run("none", tmp_path).status().over


def test_a_wait_ends_when_nothing_is_on_its_way(client: Client, worker: StepwiseWorker) -> None:
    submit(client, "foreign", run="other")
    run = client.run("r")
    run.wait(timeout=PATIENCE)
    worker.start(submit(client, "a"))
    with pytest.raises(WaitTimeout, match="job a has not ended after 0 s"):
        run.wait(timeout=0)
    ended = threading.Event()

    def wait() -> None:
        run.wait(timeout=PATIENCE)
        ended.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    worker.start(submit(client, "b"))  # while it waits for a
    worker.finish("a", "x")
    assert not ended.wait(0.1)
    worker.finish("b", "y")
    waiting.join(PATIENCE)
    assert ended.is_set()


def test_a_wait_goes_on_while_rows_are_unwritten_or_produced(client: Client) -> None:
    client.redis.xadd(keys.outbox("r"), {"row": "{}"})
    with pytest.raises(WaitTimeout, match="1 row of run 'r' is not in Parquet after 0 s"):
        client.run("r").wait(timeout=0)
    client.redis.delete(keys.outbox("r"))
    client.redis.set(keys.producer("r"), "a process")
    with pytest.raises(WaitTimeout, match="a process still enqueues its rows after 0 s"):
        client.run("r").wait(timeout=0)


@pytest.mark.parametrize("kind", [SyncConnection, AsyncConnection])
def test_the_limit_of_a_wait_holds_although_redis_is_killed(
    kind: type[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed when the wait looks for the jobs of the run: outages are waited out for 30 s else."""
    run_command = kind.run

    def run(self: Any, name: str, *args: Any, **options: Any) -> Any:
        if name == "smembers":
            with suppress(ProcessLookupError):
                os.kill(server.pid, signal.SIGKILL)
        return run_command(self, name, *args, **options)

    async def wait() -> None:
        async with AsyncClient(server.url) as client:
            await client.run("r").wait(timeout=0.5)

    monkeypatch.setattr(kind, "run", run)
    with EmbeddedRedis(tmp_path / "redis") as server:
        begin = time.monotonic()
        with pytest.raises(JobError, match="can't reach Redis"), Client(server.url) as client:
            asyncio.run(wait()) if kind is AsyncConnection else client.run("r").wait(timeout=0.5)
        assert time.monotonic() - begin < 15


def test_a_run_is_cancelled_and_no_other_one(client: Client, worker: StepwiseWorker) -> None:
    for name in ("a", "b"):
        submit(client, name)
    submit(client, "later", delay=1000)
    submit(client, "foreign", run="other")
    worker.start(submit(client, "runs"))
    worker.start(submit(client, "ends"))
    worker.finish("ends", "x")
    assert client.run("r").cancel() == 4
    assert [client.job(one).status() for one in ("a", "later", "foreign", "ends")] == [
        "cancelled",
        "cancelled",
        "queued",
        "finished",
    ]
    worker.fail("runs", JobError("cancelled", "stopped"))
    assert client.run("r").cancel() == 0


def test_rows_and_scores_are_tables(
    client: Client, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = make_run(tmp_path, answers(("a", "a"), ("b", "x")), "r")
    row = {name: 0 for name in ("row_index", "repeat_index", "choice_index", "schema_version")}
    texts = {name: "x" for name in ("run_id", "model", "status", "scorer_version")}
    scored = {**row, **texts, "metric": "exact", "value": 1.0, "created_at": datetime.now(UTC)}
    write_scores(results, "r", "exact", [pa.Table.from_pylist([scored], SCORES_SCHEMA)])
    monkeypatch.setenv("CHATJOBS_RESULTS", str(tmp_path))
    run = client.run("r")
    assert sorted(run.table(["text"])["text"].to_pylist()) == ["a", "b"]
    assert run.scores()["value"].to_pylist() == [1.0]
    with pytest.raises(JobError, match="no run 'none' in"):
        client.run("none").table()
    with pytest.raises(JobError, match="a run id has up to 100 letters"):
        client.run("../r")

    async def read() -> tuple[int, int, RunStatus, int]:
        async with AsyncClient(redis_url) as other:
            same = other.run("r", tmp_path)
            await same.wait(timeout=PATIENCE)
            tables = (await same.table()).num_rows, (await same.scores(["exact"])).num_rows
            submit(client, "a")
            return *tables, await same.status(), await same.cancel()

    assert asyncio.run(read()) == (2, 1, RunStatus(1, 0, 0, producing=False, rows=2, failed=0), 1)
