"""Foreign values beside one run's rows stop no other run."""

from __future__ import annotations

from typing import Any

import pytest

from jobs import keys
from tests.jobs.record.outboxes import fill, numbers
from tests.worker.site import PATIENCE, Site, wait_until


@pytest.mark.parametrize("field", ["part-x", "cursor", "part-1-0-2-0", "part-../../x-1-0-2-0"])
@pytest.mark.parametrize("value", [b"junk", b"\xff", b"[]", b'{"till":0,"first":"x","last":"y"}'])
def test_a_foreign_plan_stops_neither_other_runs_nor_its_file_name(
    site: Site, make: Any, caplog: pytest.LogCaptureFixture, field: str, value: bytes
) -> None:
    for run in ("aa", "bad", "zz"):
        fill(site, 2, run=run)
    site.redis.hset(keys.parts("bad"), field, value)
    recorder = make("a")
    while recorder._write_due_parts():
        pass
    assert len(site.rows("aa")) == len(site.rows("zz")) == 2
    assert len(site.rows("bad")) == (0 if field == "cursor" else 2)
    recorder._write_due_parts()
    (logged,) = [one.getMessage() for one in caplog.records if "chatjobs:parts:bad" in one.message]
    assert repr(field) in logged and "HDEL" in logged
    assert not list(site.folder.parent.glob("*.parquet"))


@pytest.mark.parametrize("key", [keys.outbox("bad"), keys.parts("bad")])
def test_a_run_with_a_key_of_another_type_stops_no_other_run(
    site: Site, make: Any, caplog: pytest.LogCaptureFixture, key: str
) -> None:
    for run in ("aa", "bad", "zz"):
        fill(site, 2, run=run)
    site.redis.delete(key)
    site.redis.set(key, "no stream, no hash")
    recorder = make("a")
    recorder._write_due_parts()
    recorder._write_due_parts()
    assert len(site.rows("aa")) == len(site.rows("zz")) == 2
    assert len([one for one in caplog.records if f"RENAME '{key}'" in one.getMessage()]) == 1


def test_a_part_that_cannot_be_written_stops_no_other_part(
    site: Site, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for run in ("aa", "bad", "zz"):
        fill(site, 2, run=run)
    recorder = make("a", plan_seconds=600.0)
    whole = recorder._write

    def fail(plan: Any, rows: Any) -> None:
        if plan.run == "bad":
            raise ValueError("a bug")
        whole(plan, rows)

    monkeypatch.setattr(recorder, "_write", fail)
    with pytest.raises(ValueError, match="a bug"):
        recorder._write_due_parts()
    assert len(site.rows("aa")) == len(site.rows("zz")) == 2


def test_foreign_keys_beside_the_outboxes_stop_no_recorder(site: Site, make: Any) -> None:
    recorder = make("a")
    fill(site, 2)
    site.redis.rpush(keys.RECORDER, "no name, for ever")
    site.redis.set(keys.WANTED, "no set")
    wait_until(recorder._may_look)
    assert recorder._write_due_parts()
    assert numbers(site) == [0, 1]


def test_outboxes_of_another_type_are_named_and_rows_are_written_when_they_are_mended(
    site: Site,
) -> None:
    site.client.serving = None
    worker = site.worker()
    site.submit().result(timeout=PATIENCE)
    wait_until(site.rows)
    site.redis.delete(keys.OUTBOXES)
    site.redis.set(keys.OUTBOXES, "x")
    job = site.submit()
    named = f"rows can't be written and stay in Redis: the key {keys.OUTBOXES} in Redis is a string"
    wait_until(lambda: named in worker.output)
    assert f"RENAME '{keys.OUTBOXES}'" in worker.output
    site.redis.rename(keys.OUTBOXES, "elsewhere")
    assert job.result(timeout=PATIENCE).text
    site.client.wait_for_rows([job], timeout=PATIENCE)
    assert worker.alive
