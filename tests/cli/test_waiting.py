"""Notices of waits: each reason once, whatever the numbers in it do."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from jobs import Client
from jobs.cli import waiting
from jobs.cli.run_watcher import RunWatcher, Stop
from jobs.cli.waiting import Rows, WaitNotice
from jobs.runs.producer import Progress
from tests.worker.site import wait_until


def notices(
    monkeypatch: pytest.MonkeyPatch, client: Client, repeat_seconds: float, last: str
) -> list[str]:
    """The output for rows that wait, until it contains `last`."""
    ages = itertools.count(1)

    def reason(*_: Any) -> str:
        age = next(ages)
        return f"rows wait for {age} s" if age < 5 else "the disk is full"

    monkeypatch.setattr(waiting, "PATIENCE_SECONDS", 0.001)
    monkeypatch.setattr(waiting, "REPEAT_SECONDS", repeat_seconds)
    monkeypatch.setattr(waiting, "reason_of_rows", reason)
    written: list[str] = []
    with WaitNotice(client.connection, quiet=False, write=written.append) as notice:
        notice.watch(Rows(("r",)))
        wait_until(lambda: last in written)
    return written


def test_a_reason_is_not_repeated_when_its_numbers_change(
    monkeypatch: pytest.MonkeyPatch, redis_url: str
) -> None:
    with Client(redis_url) as client:
        written = notices(monkeypatch, client, 3600, "the disk is full")
    assert written == ["rows wait for 1 s", "the disk is full"]


def test_a_reason_is_repeated_with_its_numbers_after_a_while(
    monkeypatch: pytest.MonkeyPatch, redis_url: str
) -> None:
    with Client(redis_url) as client:
        written = notices(monkeypatch, client, 0, "the disk is full")
    assert written == [*(f"rows wait for {age} s" for age in range(1, 5)), "the disk is full"]


def test_a_run_that_stops_says_once_that_its_rows_run() -> None:
    notes: list[str] = []

    class Shown:
        def update(self, *_: Any) -> None: ...

        def note(self, text: str) -> None:
            notes.append(text)

    shown: Any = Shown()
    nothing: Any = None
    stop = Stop()
    watcher = RunWatcher(nothing, nothing, "r", (), shown, stop, total=9, max_error_rate=None)
    stop.interrupt()
    for done, running in enumerate((99, 9, 8, 7)):  # 90 that waited are taken out of the queue
        assert not watcher.update(Progress(done, 0, 99, running, unwritten=0, tokens=0))
    assert notes == ["interrupted: waiting for 9 rows that run; Ctrl-C again does not wait"]
