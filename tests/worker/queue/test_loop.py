"""Claiming, settling, cancelling and retrying: one worker on a real Redis, with a fake backend."""

from __future__ import annotations

import itertools
import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import redis

from jobs import JobError, keys
from jobs.embedded import EmbeddedRedis
from jobs.store.control import Control
from jobs.store.job_store import JobStore
from jobs.store.limits import set_limit
from jobs.store.worker_status import read_workers, with_heartbeats
from jobs.stream.entries import END_SEQ, is_end_message
from tests.worker.fake_backend import FakeBackend, text_of
from tests.worker.site import PATIENCE, Site, wait_until
from worker.queue.lease_keeper import EXIT_HUNG
from worker.queue.loop import LEASE_SECONDS


def test_a_job_ends_with_its_result_its_stream_and_its_row(site: Site) -> None:
    job = site.submit("what", words=30, run="r1")
    site.burst()
    text = text_of(job.request)
    assert job.result(timeout=1).text == text
    chunks = list(job.stream())
    assert "".join(chunk.text for chunk in chunks) == text
    assert chunks[-1].choices[0].finish_reason == "stop"
    row = site.row(job, "r1")
    assert (row["text"], row["status"], row["attempt"]) == (text, "ok", 1)
    assert row["run_id"] == "r1"
    site.assert_settled([job], "r1")
    assert site.results.config("r1")["engine"] == "fake"


def test_bulk_jobs_publish_nothing_but_their_end(site: Site) -> None:
    bulk = site.submit(words=20, priority="bulk")
    streamed = site.submit(words=20, priority="bulk", stream=True)
    with site.redis.pubsub() as live:
        live.subscribe(keys.live(bulk.id))
        site.burst()
        messages = [live.get_message(timeout=1) for _ in range(3)]
    assert not site.redis.exists(keys.log(bulk.id))
    assert [message and message["type"] for message in messages] == ["subscribe", "message", None]
    assert is_end_message(messages[1]["data"])
    assert "".join(chunk.text for chunk in bulk.stream()) == text_of(bulk.request)
    ids = [one for one, _ in site.redis.xrange(keys.log(streamed.id))]
    assert (ids[0], ids[-1]) == (b"1-1", f"1-{END_SEQ}".encode())


def test_interactive_jobs_are_claimed_before_bulk_jobs(site: Site) -> None:
    bulk = site.submit_many(["a", "b", "c"], priority="bulk")
    chat = site.submit_many(["d", "e"])
    backend = site.burst(FakeBackend(max_batch=4))
    assert backend.begun == [job.id for job in chat + bulk]


def test_each_model_has_its_own_room(site: Site) -> None:
    class Rooms(FakeBackend):
        def room(self, model: str, *, bulk: bool) -> int:
            return 1 if model == "small" else super().room(model, bulk=bulk)

    jobs = [
        site.submit(model=model, priority=priority)
        for model in ("small", "large")
        for priority in ("bulk", "interactive")
        for _ in range(3)
    ]
    site.burst(Rooms(), models=["small", "large"])
    assert {job.status().value for job in jobs} == {"finished"}


def test_a_model_is_served_by_its_name_and_its_reference(site: Site) -> None:
    jobs = [site.submit(model=name) for name in ("some/folder", "folder") * 6]
    backend = site.burst(FakeBackend(max_batch=4), models=["some/folder", "other"])
    assert [job.result(timeout=1).model for job in jobs] == ["some/folder", "folder"] * 6
    assert backend.peak == 4  # both queues share its room
    site.assert_settled(jobs)
    assert {row["model"] for row in site.rows()} == {"some/folder", "folder"}


def test_each_choice_takes_a_place_in_the_batch(site: Site) -> None:
    jobs = site.submit_many([f"q{i}" for i in range(12)], n=3, words=10)
    backend = site.burst(FakeBackend(max_batch=8))
    assert backend.peak <= 8 + 2  # the last job may exceed the limit
    assert backend.begun == [job.id for job in jobs]
    assert {site.hash(job)["chatjobs_attempt"] for job in jobs} == {"1"}
    rows = site.rows()
    assert len(rows) == 36
    assert {row["choice_index"] for row in rows} == {0, 1, 2}


def test_a_request_that_is_wider_than_the_batch_is_served(site: Site) -> None:
    job = site.submit(n=6)
    site.burst(FakeBackend(max_batch=2))
    assert len(job.result(timeout=1).choices) == 6


def test_a_retryable_error_is_retried(site: Site) -> None:
    job = site.submit(fail="internal", retries=2, words=3)
    site.burst()
    with pytest.raises(JobError, match="requested by the test") as failure:
        job.result(timeout=1)
    assert failure.value.code == "internal"
    assert site.row(job)["attempt"] == 3
    attempts = {one.split(b"-")[0] for one, _ in site.redis.xrange(keys.log(job.id))}
    assert attempts == {b"1", b"2", b"3"}
    site.assert_settled([job])


def test_a_permanent_error_is_not_retried(site: Site) -> None:
    job = site.submit(fail="context_length_exceeded", retries=5)
    site.burst()
    assert site.row(job)["attempt"] == 1


def test_the_text_before_an_error_is_kept(site: Site) -> None:
    job = site.submit(fail="internal", retries=0)
    site.burst()
    assert site.row(job)["text"] == text_of(job.request).split(" ")[0] + " "


def test_a_job_that_waited_too_long_is_not_run(site: Site) -> None:
    job = site.submit(ttl=0.05)
    time.sleep(0.1)
    backend = site.burst()
    with pytest.raises(JobError, match=r"ttl of 0\.05 s") as failure:
        job.result(timeout=1)
    assert failure.value.code == "timeout"
    assert backend.begun == []


def test_a_job_that_runs_too_long_is_stopped(site: Site) -> None:
    job, other = site.submit(ttl=4, words=100_000), site.submit(words=3)
    site.burst()
    with pytest.raises(JobError, match="not done within") as failure:
        job.result(timeout=1)
    assert failure.value.code == "timeout"
    assert site.row(job)["text"]
    assert other.status().value == "finished"


@pytest.mark.parametrize("by_message", [True, False])
def test_one_of_eight_jobs_is_cancelled(site: Site, by_message: bool) -> None:
    jobs = site.submit_many([f"q{i}" for i in range(8)], words=60)
    jobs[5] = site.submit("long", words=100_000)
    site.redis.lrem("rq:queue:chat:fake", 1, jobs[5].id)
    site.redis.lpush("rq:queue:chat:fake", jobs[5].id)  # one of the first eight
    worker = site.worker(delay=0.01)
    wait_until(lambda: jobs[5].status().value == "started")
    if by_message:
        assert jobs[5].cancel()
    else:  # as if the message had been lost
        site.redis.hset(f"rq:job:{jobs[5].id}", "chatjobs_cancel", 1)
    wait_until(lambda: all(job.status().over for job in jobs))
    with pytest.raises(JobError) as failure:
        jobs[5].result(timeout=1)
    assert failure.value.code == "cancelled"
    assert {job.status().value for job in jobs if job is not jobs[5]} == {"finished"}
    assert worker.stop() == 0
    row = site.row(jobs[5])
    assert (row["status"], row["finish_reason"]) == ("cancelled", "cancelled")
    site.assert_settled(jobs)


def test_a_job_cancelled_while_queued_does_not_start(site: Site) -> None:
    job = site.submit()
    site.redis.hset(f"rq:job:{job.id}", "chatjobs_cancel", 1)
    backend = site.burst()
    assert backend.begun == []
    assert site.row(job)["status"] == "cancelled"


def test_a_worker_waits_while_redis_is_full(site: Site) -> None:
    jobs = site.submit_many([f"q{i}" for i in range(40)], words=20)
    site.worker(delay=0.005)
    wait_until(lambda: any(job.status().over for job in jobs))
    with site.settings(maxmemory="1"):
        time.sleep(2.0)  # longer than the lease
    wait_until(lambda: all(job.status().over for job in jobs))
    assert {job.status().value for job in jobs} == {"finished"}
    wait_until(lambda: len(site.rows()) >= 40)
    assert len({row["job_id"] for row in site.rows()}) == len(site.rows()) == 40


def test_the_worker_waits_while_redis_is_down(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path / "redis", append_only=True).start()
    site = Site(server.url, tmp_path / "results")
    jobs = site.submit_many([f"q{i}" for i in range(60)], words=20)
    # A third of the lease is the patience with Redis: less would log further failures.
    worker = site.worker(delay=0.005, lease_seconds=3.0)
    try:
        wait_until(lambda: any(job.status().over for job in jobs))
        server.stop()
        time.sleep(3.5)  # longer than the lease
        server.start()
        wait_until(lambda: all(job.status().over for job in jobs))
        wait_until(lambda: len(site.rows()) >= 60)
        assert worker.stop() == 0
        found = [worker.output.count(text) for text in ("Redis fails", "Redis is back")]
        assert found == [1, 1], worker.output
        assert {job.status().value for job in jobs} == {"finished"}
        site.assert_settled(jobs)
    finally:
        site.close()
        server.stop()


def test_redis_is_back_when_it_has_replied(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A round of the loop that sends no command says nothing about Redis."""
    caplog.set_level(logging.INFO)
    commands, ping, rounds = Control.commands, JobStore.ping, itertools.count()
    down: list[str] = []

    def read(control: Control) -> Any:
        if next(rounds) == 20:
            down.extend("abc")
            raise redis.ConnectionError("requested by the test")
        return commands(control)

    def ask(store: JobStore) -> None:
        if down:
            raise redis.ConnectionError(f"requested by the test: {down.pop()}")
        ping(store)

    monkeypatch.setattr(Control, "commands", read)
    monkeypatch.setattr(JobStore, "ping", ask)
    job = site.submit(words=200)
    site.burst(FakeBackend(delay=0.01), lease_seconds=LEASE_SECONDS)  # it waits long for replies
    assert job.status().value == "finished" and not down
    messages = [record.getMessage() for record in caplog.records]
    assert len([one for one in messages if one.startswith("Redis fails")]) == 1
    assert messages.count("Redis is back") == 1


def test_a_dead_engine_returns_its_jobs(site: Site) -> None:
    job, other = site.submit(die=1, words=9), site.submit()
    with pytest.raises(JobError, match="engine thread died"):
        site.burst(FakeBackend(delay=0.02))
    assert job.status().value == other.status().value == "queued"
    assert site.redis.llen("rq:queue:chat:fake") == 2
    assert not site.redis.exists("rq:wip:chat:fake")
    for _ in range(2):
        with pytest.raises(JobError, match="engine thread died"):
            site.burst(FakeBackend(max_batch=1, delay=0.02))
    with pytest.raises(JobError) as failure:
        job.result(timeout=1)
    assert failure.value.code == "worker_lost"
    site.burst()
    assert other.status().value == "finished"
    site.assert_settled([job, other])


def test_a_worker_whose_engine_hangs_ends_and_loses_its_jobs(site: Site) -> None:
    jobs = site.submit_many(["a", "b"])
    hung = site.worker(hangs=True, hang_seconds=3.0)
    assert hung.wait() == EXIT_HUNG
    assert "the engine has work but made no progress for 3 s" in hung.output
    assert "in _loop" in hung.output  # the stacks of all threads
    site.worker()
    wait_until(lambda: all(job.status().over for job in jobs))
    assert [job.result(timeout=1).text for job in jobs] == [text_of(job.request) for job in jobs]


@pytest.mark.parametrize("limit", ["rows", "bytes"])
def test_a_backlog_of_rows_pauses_claiming(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, limit: str
) -> None:
    caplog.set_level(logging.INFO)
    if limit == "rows":
        monkeypatch.setattr("worker.queue.admission.BACKLOG_ROWS", 3)
        reason = "more than 3 rows wait for Parquet"
    else:
        set_limit(site.redis, "outbox_bytes", 100)
        reason = "rows of more than 100 bytes (outbox_bytes) wait for Parquet"
    site.redis.sadd(keys.OUTBOXES, "not a run")  # no recorder writes it
    for _ in range(4):
        site.redis.xadd(keys.outbox("not a run"), {"row": "x"})

    def messages() -> list[str]:
        return [record.getMessage() for record in caplog.records]

    class Emptied(FakeBackend):
        def memory(self):
            """Called at each check."""
            if paused in messages():
                site.redis.delete(keys.outbox("not a run"))
            return super().memory()

    paused = f"not claiming jobs: {reason}"
    job = site.submit()
    backend = Emptied()
    site.burst(backend)
    assert backend.begun == [job.id]
    assert "claiming jobs again" in messages()[messages().index(paused) :]


def test_a_worker_that_is_stopped_logs_its_jobs_and_their_time(site: Site) -> None:
    site.submit_many(["one", "two"], words=100_000)
    worker = site.worker(grace=0.5)
    # Claimed is not enough: a job that is claimed and not begun goes back before the log.
    wait_until(lambda: [one["jobs"] for one in read_workers(site.redis)] == [2])
    assert worker.stop() == 0
    assert "stopping: no new jobs; jobs that are running: 2, with 0.5 s to finish" in worker.output
    assert worker.output.count("stopping: ") == 1


def test_the_worker_describes_itself(site: Site) -> None:
    worker = site.worker(lease_seconds=60.0)
    site.wait_for_workers()
    (key,) = site.redis.scan_iter(keys.worker("*"))
    report = json.loads(site.redis.get(key))
    assert (report["models"], report["pid"], report["jobs"]) == (["fake"], worker.pid, 0)
    assert {"host", "memory", "running", "tokens_per_second", "started_at"} <= report.keys()
    assert 0 < site.redis.pttl(key) <= 60_000


def test_a_worker_whose_loop_is_busy_stays_listed(site: Site) -> None:
    site.worker(lease_seconds=3.0)
    site.wait_for_workers()
    job = site.submit(slow=5)
    wait_until(lambda: job.status() == "started")
    until = time.monotonic() + 4
    while time.monotonic() < until:
        assert read_workers(site.redis)
        time.sleep(0.05)
    (worker,) = with_heartbeats(site.redis, read_workers(site.redis))
    assert (worker["heartbeat_s"] or 0) < 3 < (worker["report_s"] or 0) < 60
    job.result(timeout=PATIENCE)


def test_a_killed_worker_leaves_the_status_before_its_lease_ends(site: Site) -> None:
    doomed = site.worker(lease_seconds=12.0)
    wait_until(lambda: read_workers(site.redis))
    doomed.kill()
    ((name, lease),) = site.redis.zrange(keys.WORKERS, 0, -1, withscores=True)
    assert site.redis.pexpiretime(keys.worker(name.decode())) < lease
    wait_until(lambda: not read_workers(site.redis))
