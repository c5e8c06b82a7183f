"""Foreign values in the keys of chatjobs affect only the job, run or queue that they belong to."""

from __future__ import annotations

import time
from typing import Any

import pytest

from jobs import JobError, keys
from jobs.store.job_store import JobStore
from jobs.store.rq_layout import job_key
from jobs.store.workers import Workers
from tests.worker.queue.rq_jobs import fetch
from tests.worker.site import PATIENCE, Site, wait_until


@pytest.mark.parametrize("score", ["inf", "-inf", "1e300"])
def test_a_foreign_lease_is_left_out_and_named(
    site: Site, score: str, caplog: pytest.LogCaptureFixture
) -> None:
    workers = Workers(site.url, "w1", [], patience=5.0)
    site.redis.zadd(keys.WORKERS, {"w1": 7, "odd": score, b"\xff": 8})
    assert workers.leases() == workers.leases() == {"w1": 7}
    workers.close()
    named = [one.getMessage() for one in caplog.records]
    assert len(named) == 2  # not at each look
    assert all("chatjobs:workers" in one and "ZREM" in one for one in named)


@pytest.mark.parametrize("value", [b"x", b"-1", b"1e400", b"99999999999999999999", b"\xff", None])
def test_a_foreign_backlog_is_counted_again(site: Site, store: JobStore, value: Any) -> None:
    site.redis.sadd(keys.OUTBOXES, "r1", "r2")
    site.redis.xadd(keys.outbox("r1"), {"row": "x"})
    site.redis.set(keys.outbox("r2"), "no stream")
    if value is None:
        site.redis.rpush(keys.BACKLOG, "no string")
    else:
        fields = ("rows", "bytes", "due", "cursor", "rows_so_far", "bytes_so_far")
        site.redis.hset(keys.BACKLOG, mapping=dict.fromkeys(fields, value))
    assert store.backlog().rows == 1
    assert store.backlog() == store.backlog()


def test_a_stage_that_fails_is_named_and_works_again(site: Site) -> None:
    worker = site.worker()
    site.submit().result(timeout=PATIENCE)
    site.redis.set("rq:scheduled:chat:fake", "no sorted set")
    site.redis.rpush("rq:queue:chat:fake", "wakes the claim")
    named = "claiming jobs fails: the key rq:scheduled:chat:fake in Redis is"
    wait_until(lambda: named in worker.output)  # the upkeep names it for itself
    assert "RENAME" in worker.output
    site.redis.rename("rq:scheduled:chat:fake", "elsewhere")
    assert site.submit().result(timeout=PATIENCE).text
    assert worker.alive
    assert worker.output.count(named) == 1


def test_a_foreign_value_of_one_job_stops_no_upkeep(
    site: Site, store: JobStore, caplog: pytest.LogCaptureFixture
) -> None:
    overdue, cancelled, deferred = site.submit_many(["a", "b", "c"], ttl=0.001)
    fetch(site, cancelled).cancel()
    site.redis.set("rq:job:bad", "no hash")
    site.redis.zadd(keys.DEADLINES, {"bad": 1, b"\xff": 1})
    site.redis.zadd("rq:canceled:chat:fake", {"bad": 1e12, b"\xff": 1e12})
    site.redis.zadd("rq:deferred:chat:fake", {"bad": 1, deferred.id: 2})
    site.redis.hset(job_key(deferred.id), mapping={"chatjobs_session": "s", "status": "deferred"})
    site.redis.set(keys.open_turns("s"), "no list")
    time.sleep(0.01)
    for _ in range(2):
        store.maintenance.step()
    assert overdue.status() == "failed"
    assert site.redis.hget(job_key(cancelled.id), "chatjobs_row") == b"0"
    assert len([one for one in caplog.records if "RENAME 'rq:job:bad'" in one.getMessage()]) == 1


@pytest.mark.parametrize(
    "key", [keys.DEADLINES, "rq:deferred:chat:fake", "rq:failed:chat:fake", "rq:queue:chat:fake"]
)
def test_a_key_of_another_type_stops_no_other_upkeep(
    site: Site, store: JobStore, caplog: pytest.LogCaptureFixture, key: str
) -> None:
    cancelled = site.submit("a", priority="bulk")
    fetch(site, cancelled).cancel()
    site.redis.set(key, "x")
    store.maintenance.step()
    assert site.redis.hget(job_key(cancelled.id), "chatjobs_row") == b"0"
    assert f"RENAME '{key}'" in caplog.text


def test_a_run_whose_outbox_is_foreign_holds_back_its_own_jobs_alone(site: Site) -> None:
    site.client.serving = None
    site.redis.set(keys.outbox("bad"), "no stream")
    worker = site.worker()
    bad = site.submit("bad", run="bad")
    wait_until(lambda: f"{keys.outbox('bad')} in Redis is a string" in worker.output)
    others = site.submit_many(["a", "b", "c"], run="good")
    assert all(job.result(timeout=PATIENCE).text for job in others)
    assert not bad.status().over
    site.redis.rename(keys.outbox("bad"), "elsewhere")
    assert bad.result(timeout=PATIENCE).text
    site.client.wait_for_rows([bad, *others], timeout=PATIENCE)


def test_a_job_whose_keys_are_overwritten_while_it_runs_stops_no_other(site: Site) -> None:
    site.client.serving = None
    worker = site.worker(delay=0.02)
    bad, other = site.submit_many(["bad", "other"], words=100, stream=True)
    wait_until(lambda: other.status() == "started" and bad.status() == "started")
    for key in (job_key(bad.id), keys.log(bad.id)):
        site.redis.delete(key)
        site.redis.set(key, "x")
    assert other.result(timeout=PATIENCE).text
    assert "".join(chunk.text for chunk in other.stream()) == other.result().text
    assert site.submit().result(timeout=PATIENCE).text
    assert worker.alive


@pytest.mark.parametrize("deadline", ["9" * 400, "9" * 5000])
def test_a_foreign_deadline_of_one_job_stops_no_claim(site: Site, deadline: str) -> None:
    bad, other = site.submit_many(["a", "b"], ttl=3600)
    site.redis.hset(job_key(bad.id), "chatjobs_deadline", deadline)
    site.burst()
    assert bad.result(timeout=PATIENCE).text and other.result(timeout=PATIENCE).text


@pytest.mark.parametrize(
    "key", ["rq:wip:bulk:fake", "rq:scheduled:bulk:fake", "rq:queue:bulk:fake"]
)
def test_a_foreign_key_of_the_bulk_queue_stops_no_interactive_job(site: Site, key: str) -> None:
    site.redis.set(key, "x")
    with pytest.raises(JobError, match=f"RENAME '{key}'"):
        site.submit("bulk", priority="bulk")
    worker = site.worker()
    assert site.submit().result(timeout=PATIENCE).text
    assert worker.alive


@pytest.mark.parametrize("change", ["deleted", "of another type", "another attempt"])
def test_a_running_job_whose_hash_is_changed_keeps_its_lease_and_gets_its_row(
    site: Site, change: str
) -> None:
    """The worker looks at its own leases once a second here, several times while the job runs."""
    worker = site.worker(delay=0.15)
    job = site.submit("a", words=20, run="r")
    wait_until(lambda: job.status() == "started")
    key = job_key(job.id)
    if change == "another attempt":
        site.redis.hset(key, "chatjobs_attempt", 7)
    else:
        site.redis.delete(key)
    if change == "of another type":
        site.redis.set(key, "of another program")
    wait_until(lambda: site.rows("r"))
    assert [row["status"] for row in site.rows("r")] == ["ok"]
    assert "lost the lease" not in worker.output
    assert worker.stop() == 0
