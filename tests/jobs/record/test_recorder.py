"""Outbox → files: each row once, whichever process dies or freezes between two steps."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from jobs import keys
from jobs.operations import rows_of
from jobs.record import recorder as module
from jobs.results.files import write_part
from jobs.store.results_folder import ID_FILE
from tests.jobs.record.outboxes import RUN, files, fill, numbers, plan_next
from tests.worker.site import PATIENCE, Site, wait_until

# --- parts ----------------------------------------------------------------------------------------


def test_a_part_is_due_by_rows_or_by_age(site: Site, make: Any) -> None:
    patient = make("a", idle=lambda: False, part_seconds=600.0)
    fill(site, 10)
    assert not patient._write_due_parts()
    time.sleep(0.2)
    assert make("b", idle=lambda: False, part_seconds=0.1)._write_due_parts()
    assert numbers(site) == list(range(10))
    fill(site, module.PART_ROWS + 7, first=10)
    assert patient._write_due_parts()
    assert len(numbers(site)) == module.PART_ROWS + 10
    assert site.redis.xlen(keys.outbox(RUN)) == 7


def test_an_idle_worker_writes_earlier(
    site: Site, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "IDLE_PART_SECONDS", 600.0)
    idle = make("idle", idle=lambda: True, part_seconds=600.0)
    fill(site, 3)
    assert not idle._write_due_parts()
    monkeypatch.setattr(module, "IDLE_PART_SECONDS", 0.1)
    time.sleep(0.2)
    assert not make("busy", idle=lambda: False, part_seconds=600.0)._write_due_parts()
    assert idle._write_due_parts()


def test_chats_of_an_idle_worker_share_a_file(site: Site, make: Any) -> None:
    a = make("a", part_seconds=600.0)
    for number in range(5):
        fill(site, 1, first=number)
        assert not a._write_due_parts()
    a.start()
    assert a.finish(lambda fault: False)
    assert [sorted(rows) for rows in files(site).values()] == [[0, 1, 2, 3, 4]]


def test_rows_that_somebody_waits_for_are_written_at_once(site: Site, make: Any) -> None:
    a = make("a", idle=lambda: False, part_seconds=600.0)
    jobs = site.submit_many(["a", "b"], run=RUN)
    site.burst(results=None)
    fill(site, 1, run="other")
    waiting = threading.Thread(target=site.client.wait_for_rows, args=(jobs, PATIENCE))
    waiting.start()
    wait_until(lambda: site.redis.sismember(keys.WANTED, RUN))
    assert a._write_due_parts()
    waiting.join()
    assert len(numbers(site)) == 2
    assert site.rows("other") == []
    assert not site.redis.exists(keys.WANTED)


def test_a_part_has_at_most_part_bytes(
    site: Site, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PART_BYTES", 400_000)
    fill(site, 1000, text="x" * 1000)
    a = make("a")
    while a._write_due_parts():
        pass
    assert numbers(site) == list(range(1000))
    counts = [len(rows) for rows in files(site).values()]
    assert len(counts) > 3
    assert max(counts) < 500


def test_nothing_is_left_in_redis_when_all_is_written(site: Site, make: Any) -> None:
    fill(site, 3)
    make("a")._write_due_parts()
    assert not site.redis.exists(keys.outbox(RUN), keys.parts(RUN), keys.OUTBOXES)
    fill(site, 3, first=3)
    make("a")._write_due_parts()
    assert numbers(site) == list(range(6))


def test_two_recorders_share_the_parts(site: Site, make: Any) -> None:
    a, b = make("a", plan_seconds=60), make("b", plan_seconds=60)
    fill(site, 4)
    first = plan_next(a)
    assert plan_next(b) is None
    fill(site, 4, first=4)
    second = plan_next(b)
    b._execute(second)
    a._execute(first)
    assert [sorted(rows) for rows in files(site).values()] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_of_all_recorders_one_looks_at_the_outboxes_at_a_time(
    site: Site, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOCK_SECONDS", 600.0)
    a, b = make("a"), make("b")
    assert not a._may_look()  # there are none
    fill(site, 1)
    assert a._may_look()
    assert not a._may_look() and not b._may_look()
    assert site.redis.delete(keys.RECORDER)  # as when the time has passed
    assert b._may_look()
    assert not a._may_look()


def test_a_recorder_whose_worker_became_idle_looks_at_once_and_often(
    site: Site, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOCK_SECONDS", 600.0)
    monkeypatch.setattr(module, "SOON_SECONDS", 600.0)
    a, b = make("a"), make("b")
    fill(site, 1)
    assert a._may_look()
    b.wake()
    assert b._may_look() and b._may_look()
    assert not a._may_look()
    b._soon_until = 0.0  # some time later
    assert not b._may_look()


def test_recorders_look_less_often_at_many_runs(site: Site, make: Any) -> None:
    site.redis.sadd(keys.OUTBOXES, *map(str, range(10_000)))
    assert make("a")._may_look()
    assert site.redis.pttl(keys.RECORDER) > 1000


def test_the_parts_of_many_runs_are_planned_in_one_round_trip(site: Site, make: Any) -> None:
    runs = [f"run-{number}" for number in range(50)]
    for run in runs:
        fill(site, 1, run=run)
    recorder = make("a")
    before = site.redis.info("stats")["total_reads_processed"]
    assert [plan.run for plan in recorder._plan(runs)] == runs
    assert site.redis.info("stats")["total_reads_processed"] - before < 10


# --- death and freezing ---------------------------------------------------------------------------


def test_a_frozen_recorder_writes_the_same_file_again(site: Site, make: Any) -> None:
    a, b = make("a"), make("b")
    fill(site, 5)
    plan = plan_next(a)
    assert plan is not None
    values = a._plans.rows(plan)
    rows = [row for value in values for row in module._rows(value, plan)]
    time.sleep(0.3)  # a is frozen, its plan expires
    assert b._write_due_parts()
    before = files(site)
    fill(site, 5, first=5)
    assert b._write_due_parts()
    a._write(plan, rows)  # a continues
    a._commit(plan)
    assert files(site).items() >= before.items()
    assert numbers(site) == list(range(10))


def test_a_frozen_recorder_that_reads_late_writes_nothing(site: Site, make: Any) -> None:
    a, b = make("a"), make("b")
    fill(site, 5)
    plan = plan_next(a)
    time.sleep(0.3)
    assert b._write_due_parts()
    before = files(site)
    a._execute(plan)
    assert files(site) == before


@pytest.mark.parametrize("fault", ["planned", "durable", "written", "renamed"])
def test_the_next_recorder_writes_the_file_of_a_dead_one(site: Site, fault: str) -> None:
    jobs = site.submit_many([f"q{i}" for i in range(20)], run=RUN)
    first = site.worker(fault=fault)
    assert first.wait() == -9
    started = [key for key in site.redis.hkeys(keys.parts(RUN)) if key != b"cursor"]
    assert len(started) == 1
    site.worker(burst=True).wait()
    assert all(job.result(timeout=1) for job in jobs)
    assert f"{started[0].decode()}.parquet" in files(site)
    site.assert_settled(jobs, RUN)


# --- errors ---------------------------------------------------------------------------------------


def test_a_full_disk_keeps_the_rows_and_is_logged_once(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(module, "WRITE_RETRY_SECONDS", 0.1)
    failures: list[Path] = []

    def full(temporary: Path, final: Path, table: Any) -> None:
        if len(failures) < 3:
            failures.append(temporary)
            temporary.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_part(temporary, final, table)

    monkeypatch.setattr(module, "write_part", full)
    jobs = site.submit_many(["a", "b"], run=RUN)
    site.burst()
    assert len(failures) == 3
    messages = [record.getMessage() for record in caplog.records]
    assert len([one for one in messages if "No space left" in one]) == 1
    assert "rows are written again" in messages
    site.assert_settled(jobs, RUN)


@pytest.mark.parametrize("error", [OSError(errno.EIO, os.strerror(errno.EIO)), ValueError("bug")])
def test_a_recorder_that_fails_gives_its_plans_up(
    site: Site, make: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    broken, working = make("broken", plan_seconds=600.0), make("working", plan_seconds=600.0)
    fill(site, 3)
    fill(site, 3, run="r2")

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(broken, "_write", fail)
    with pytest.raises(type(error)):
        broken._write_due_parts()
    assert working._write_due_parts()
    assert numbers(site) == [0, 1, 2]
    assert len(site.rows("r2")) == 3


def test_only_the_owner_gives_a_plan_up(site: Site, make: Any) -> None:
    a, b = make("a", plan_seconds=600.0), make("b", plan_seconds=600.0)
    fill(site, 3)
    plan = plan_next(a)
    b._plans.release(plan)
    assert plan_next(b) is None
    a._plans.release(plan)
    assert plan_next(b) == plan


def test_an_invalid_entry_does_not_stop_others(
    site: Site, make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    fill(site, 2)
    site.redis.xadd(keys.outbox(RUN), {"row": b"{"})
    site.redis.xadd(keys.outbox(RUN), {"row": b"[]"})
    site.redis.xadd(keys.outbox(RUN), {"other": b"\xff"})
    fill(site, 2, first=2)
    make("a")._write_due_parts()
    assert numbers(site) == [0, 1, 2, 3]
    assert len([one for one in caplog.records if "invalid outbox entry" in one.getMessage()]) == 3
    assert not site.redis.exists(keys.outbox(RUN))


def test_a_row_that_does_not_fit_does_not_stop_others(
    site: Site, make: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fill(site, 3)

    def odd(entry: Any) -> list[Any]:
        rows = rows_of(entry)
        return [{**row, "attempt": "one"} if row["row_index"] == 1 else row for row in rows]

    monkeypatch.setattr(module, "rows_of", odd)
    make("a")._write_due_parts()
    assert numbers(site) == [0, 2]
    assert "job-1" in caplog.text


@pytest.mark.parametrize("run", ["../outside", "/abs", "a/b", ""])
def test_a_run_that_is_no_valid_folder_name_is_ignored(site: Site, make: Any, run: str) -> None:
    site.redis.sadd(keys.OUTBOXES, run)
    site.redis.xadd(keys.outbox(run), {"row": "{}"})
    assert not make("a")._write_due_parts()
    assert os.listdir(site.folder) == [ID_FILE]


# --- the last recorder ----------------------------------------------------------------------------


def test_finishing_waits_for_the_part_of_a_dead_recorder(site: Site, make: Any) -> None:
    fill(site, 3)
    assert plan_next(make("dead", plan_seconds=0.6)) is not None
    last = make("last", plan_seconds=0.6)
    last.start()
    assert last.finish(lambda fault: False, with_others=True)
    assert numbers(site) == [0, 1, 2]


def test_an_abort_leaves_the_rows_in_redis(site: Site, make: Any) -> None:
    fill(site, 3)
    plan_next(make("dead", plan_seconds=60))
    last = make("last")
    last.start()
    assert not last.finish(lambda fault: True, with_others=True)
    wait_until(lambda: not last._thread.is_alive())
    assert site.redis.xlen(keys.outbox(RUN)) == 3


def test_the_last_recorder_leaves_rows_that_come_later_to_others(
    site: Site, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would go on as long as other workers end jobs."""
    fill(site, 3)
    last = make("last", part_seconds=600.0)
    wait, rounds = last._wait_until_durable, []

    def wait_while_others_end_jobs() -> None:
        rounds.append(1)
        fill(site, 3, first=100 * len(rounds))
        wait()

    monkeypatch.setattr(last, "_wait_until_durable", wait_while_others_end_jobs)
    last.start()
    assert last.finish(lambda fault: len(rounds) > 5)
    assert numbers(site) == [0, 1, 2]
    assert site.redis.xlen(keys.outbox(RUN)) == 3


def test_a_recorder_that_gives_up_before_it_plans_leaves_rows(
    site: Site, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(site, 3)
    last, looks = make("last"), threading.Event()

    def give_up() -> None:
        looks.set()
        assert last._stop.wait(PATIENCE)

    monkeypatch.setattr(last, "_check_folder", give_up)
    last._finishing.set()  # before its first round
    last.start()
    assert not last.finish(lambda fault: looks.is_set())
    assert site.redis.xlen(keys.outbox(RUN)) == 3


def test_a_recorder_that_stops_gives_its_plan_to_others(site: Site, make: Any) -> None:
    fill(site, 3)
    last, other = make("last", plan_seconds=600.0), make("other", plan_seconds=600.0)
    (site.folder / RUN).write_text("in the way")
    last.start()
    assert not last.finish(bool)  # until it has a fault
    wait_until(lambda: not last._thread.is_alive())
    (site.folder / RUN).unlink()
    assert other._write_due_parts()
    assert numbers(site) == [0, 1, 2]


def test_a_fault_that_has_passed_does_not_end_the_wait_for_the_last_rows(
    site: Site, make: Any
) -> None:
    """As after an outage of Redis: the last recorder gives up sooner if it has a fault."""
    fill(site, 3)
    last = make("last")
    (site.folder / RUN).write_text("in the way")
    last.start()
    wait_until(lambda: last.state["error"])
    (site.folder / RUN).unlink()
    assert last.finish(bool)  # until it has a fault
    assert numbers(site) == [0, 1, 2]
