"""The rows that wait for Parquet are counted by all workers together, a portion at a time."""

from __future__ import annotations

from typing import Any

import pytest

from jobs import keys
from jobs.store import backlog
from jobs.store.backlog import Backlog, BacklogCounter
from jobs.store.limits import DEFAULTS
from tests.worker.site import Site, wait_until


def add_rows(site: Site, runs: int, rows: int = 1) -> None:
    pipeline = site.redis.pipeline()
    for run in range(runs):
        pipeline.sadd(keys.OUTBOXES, f"run{run}")
        for _ in range(rows):
            pipeline.xadd(keys.outbox(f"run{run}"), {"row": "x" * 100})
    pipeline.execute()


def calls(site: Site) -> dict[str, int]:
    """The number of calls of each command so far."""
    found: dict[str, Any] = site.redis.info("commandstats")
    return {name.removeprefix("cmdstat_"): int(one["calls"]) for name, one in found.items()}


def test_the_rows_and_bytes_of_all_outboxes_are_counted(site: Site) -> None:
    add_rows(site, runs=3, rows=5)
    sizes = [site.redis.memory_usage(keys.outbox(f"run{run}")) for run in range(3)]
    assert BacklogCounter(site.redis).read() == Backlog(15, sum(sizes), DEFAULTS.outbox_bytes)


def test_workers_count_once_for_all_and_again_later(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backlog, "PAUSE_MILLISECONDS", 600_000)
    add_rows(site, runs=2)
    one, other = BacklogCounter(site.redis), BacklogCounter(site.redis)
    assert one.read().rows == 2
    add_rows(site, runs=3)
    before = calls(site).get("xlen", 0)
    assert other.read().rows == 2
    assert calls(site).get("xlen", 0) == before
    monkeypatch.setattr(backlog, "PAUSE_MILLISECONDS", 0)
    wait_until(lambda: other.read().rows == 5)


def test_a_call_counts_a_portion_and_the_next_worker_goes_on(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backlog, "PAUSE_MILLISECONDS", 600_000)
    monkeypatch.setattr(backlog, "EXPIRE_MILLISECONDS", 900_000)
    runs = 5 * backlog.PORTION
    add_rows(site, runs)
    counters = [BacklogCounter(site.redis) for _ in range(10)]
    seen = []
    for counter in counters:
        before = calls(site).get("xlen", 0)
        found = counter.read()
        looked = calls(site).get("xlen", 0) - before
        assert looked <= 2 * backlog.PORTION
        seen.append((found.rows, looked))
    assert sum(looked for _, looked in seen) == seen[-1][0] == runs
    assert seen[-1][1] == 0


def test_an_abandoned_count_expires(site: Site) -> None:
    add_rows(site, 1)
    BacklogCounter(site.redis).read()
    assert 0 < site.redis.pttl(keys.BACKLOG) <= backlog.EXPIRE_MILLISECONDS
