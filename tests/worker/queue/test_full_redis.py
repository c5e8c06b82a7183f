"""A Redis that has used up its memory refuses producers first; workers go on and make room."""

from __future__ import annotations

import random
import string
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import rq

from jobs import Client, JobError, keys
from jobs.api.answer import AssistantMessage, ChatCompletion, Choice, Usage
from jobs.record.folder import ResultsFolder
from jobs.record.recorder import Recorder
from jobs.store.claimed_job import ClaimedJob
from jobs.store.connection.protocol import run_sync
from jobs.store.expiry import SECONDS_WHEN_FULL
from jobs.store.job_store import JobStore
from jobs.store.leases import StartedJob
from jobs.store.limits import set_limit
from jobs.store.purge import purge
from jobs.store.requeue import requeue
from jobs.store.results_folder import ID_FILE
from jobs.store.rq_layout import job_key
from jobs.store.settlement import Settlement, settlement_of
from jobs.store.stream import StreamWriter
from jobs.store.workers import Workers
from jobs.stream.delta import Delta
from jobs.stream.entries import Entry
from tests.worker.queue.rq_jobs import fetch
from tests.worker.queue.test_job_store import claim, ended
from tests.worker.site import PATIENCE, Site, wait_until
from worker.queue.loop import LEASE_SECONDS


@contextmanager
def room(site: Site, megabytes: float) -> Iterator[None]:
    """Redis has this much memory left."""
    used = site.redis.info("memory")["used_memory"]
    with site.settings(maxmemory=str(int(used + megabytes * 1e6))):
        yield


def prompts(count: int, size: int = 20_000) -> Iterator[str]:
    letters = random.Random(1)
    return ("".join(letters.choices(string.printable, k=size)) for _ in range(count))


def fill(site: Site, **fields: Any) -> tuple[int, JobError]:
    """Submit jobs until Redis refuses one. Returns how many it took, and the error."""
    for number, prompt in enumerate(prompts(2000)):
        try:
            site.submit(prompt, **fields)
        except JobError as error:
            return number, error
    raise AssertionError("Redis accepted all jobs")


def test_a_full_redis_refuses_submits_with_the_numbers(site: Site) -> None:
    with room(site, 1.5):
        taken, error = fill(site)
        assert taken > 20
        assert error.code == "queue_full"
        limit = int(site.redis.config_get("maxmemory")["maxmemory"]) / 1e6
        assert "Redis is full: it uses " in error.message
        assert f", and maxmemory is {limit:.1f} MB; " in error.message
        assert error.retryable
        assert site.redis.llen("rq:queue:chat:fake") == taken
    with site.settings(maxmemory="1"), pytest.raises(JobError) as many:
        site.submit_many(["a", "b"])
    assert many.value.code == "queue_full"
    assert "0 of 2 requests are enqueued" in many.value.message


def test_workers_drain_a_full_redis_and_submits_are_accepted_again(site: Site) -> None:
    with room(site, 1.5):
        taken, _ = fill(site, result_ttl=1)
        store = JobStore(site.redis, ["fake"], "w1", "rq:worker:w1")
        while claimed := claim(store, 50):
            assert all(store.settle([finished(one) for one in claimed]))
        assert site.redis.xlen(keys.outbox("default")) == taken
        record(site)
        wait_until(lambda: not list(site.redis.scan_iter("rq:job:*")))
        site.submit("again")
    assert len(site.rows()) == taken


def test_the_first_worker_starts_on_a_redis_that_jobs_have_filled_and_drains_it(site: Site) -> None:
    """Nothing of a worker is in Redis yet: no script, no folder, no entry of its own."""
    site.redis.script_flush()
    with room(site, 1.5):
        taken, _ = fill(site, result_ttl=1)
        site.redis.config_set("maxmemory", "1")  # producers have taken all room that there was
        worker = site.worker(lease_seconds=LEASE_SECONDS)  # a third of it is its patience
        wait_until(lambda: len(site.rows()) == taken)
        (name,) = (found.decode() for found in site.redis.zrange(keys.WORKERS, 0, -1))
        wait_until(lambda: site.redis.exists(keys.worker(name)))
        assert [one.name for one in rq.Worker.all(connection=site.redis)] == [name]
        assert worker.stop() == 0
    assert "Redis is full" not in worker.output
    assert "Redis fails" not in worker.output
    assert not site.redis.zcard(keys.WORKERS)
    assert not rq.Worker.all(connection=site.redis)
    site.submit("again")


def test_a_worker_on_a_full_redis_with_another_folder_is_refused_all_the_same(
    site: Site, tmp_path: Path
) -> None:
    with site.settings(maxmemory="1"):
        site.burst()
        with pytest.raises(JobError, match="is not the one of the other workers"):
            site.burst(results=tmp_path / "other")


def test_rows_are_waited_for_on_a_full_redis(site: Site) -> None:
    jobs = site.submit_many(["a", "b"], run="r")
    worker = site.worker()
    wait_until(lambda: all(job.status().over for job in jobs))
    with site.settings(maxmemory="1"):
        site.client.wait_for_rows(jobs, timeout=PATIENCE)
    assert len(site.rows("r")) == 2
    assert worker.stop() == 0


def test_an_overdue_job_that_cannot_be_read_stops_nothing_on_a_full_redis(site: Site) -> None:
    site.redis.zadd(keys.DEADLINES, {"damaged": 1})
    site.redis.set(job_key("damaged"), "of another program")
    job = site.submit("a")
    with site.settings(maxmemory="1"):
        worker = site.worker(lease_seconds=LEASE_SECONDS)
        wait_until(lambda: job.status().over)
        assert worker.stop() == 0
    assert "Redis fails" not in worker.output
    assert "damaged" in worker.output


def test_a_purge_makes_room_in_a_full_redis(site: Site) -> None:
    job = site.submit("a", ttl=3600)
    fetch(site, job).cancel()  # RQ's own, which counts nothing
    with site.settings(maxmemory="1"):
        assert run_sync(purge(job.id), site.client.connection)
    assert not site.redis.exists(keys.OPEN_BYTES, keys.DEADLINES, job_key(job.id))


def test_every_step_of_a_worker_runs_while_redis_is_full(site: Site) -> None:
    jobs = site.submit_many([f"q{i}" for i in range(4)])
    writer = StreamWriter(site.redis)
    with site.settings(maxmemory="1"):
        store = JobStore(site.redis, ["fake"], "w1", "rq:worker:w1")
        claimed = claim(store, 3)
        assert [one.lease.job for one in claimed] == [job.id for job in jobs[:3]]
        store.leases.give_back([claimed[2].lease])
        workers = Workers(site.url, "w1", store.queues, 5.0)
        workers.renew(60.0, stopping=False)
        assert workers.elect_reaper(60.0)
        store.leases.reclaim([StartedJob(claimed[1].lease, 1)])
        assert writer.write_many([Entry(jobs[0].id, 1, 1, (Delta(0, "x"),))]) == [True]
        assert store.settle([ended(claimed[0])]) == [True]
        assert jobs[3].cancel()
        with pytest.raises(JobError, match="Redis is full"):
            site.submit("x")
    assert site.redis.xlen(keys.outbox("default")) == 2


def test_results_are_kept_shortly_while_redis_is_full(site: Site) -> None:
    first, second = site.submit_many(["a", "b"])
    store = JobStore(site.redis, ["fake"], "w1", "rq:worker:w1")
    for job in claim(store, 2):
        full = job.lease.job == second.id
        with site.settings(maxmemory="1") if full else nullcontext():
            store = JobStore(site.redis, ["fake"], "w1", "rq:worker:w1")
            assert store.settle([finished(job)]) == [True]
    assert site.redis.ttl(job_key(first.id)) > SECONDS_WHEN_FULL
    assert 0 < site.redis.ttl(job_key(second.id)) <= SECONDS_WHEN_FULL


def test_the_limit_of_jobs_refuses_the_next_one(site: Site) -> None:
    set_limit(site.redis, "jobs", 3)
    site.submit_many(["a", "b"])
    site.submit("c", priority="bulk")
    claim(JobStore(site.redis, ["fake"], "w1", "rq:worker:w1"), 1)  # a running job counts too
    with pytest.raises(JobError) as caught:
        site.submit("d")
    assert caught.value.code == "queue_full"
    assert "3 jobs that have not ended, and the limit (jobs) is 3" in caught.value.message
    site.client.submit({"model": "other", "messages": [{"role": "user", "content": "x"}]})


def test_turns_that_wait_for_their_session_count_as_jobs(site: Site) -> None:
    set_limit(site.redis, "jobs", 3)
    site.client.serving = None
    session = site.client.session(model="fake")
    session.submit("a", wait=True)
    session.submit("b", wait=True)
    session.submit("c", wait=True, job={"priority": "bulk"})
    for refused in (partial(session.submit, "d", wait=True), partial(site.submit, "d")):
        with pytest.raises(JobError, match=r"not ended, and the limit \(jobs\) is 3"):
            refused()
    site.burst()
    session.submit("d", wait=True)


def test_suspects_count_as_jobs_and_can_be_cancelled(site: Site) -> None:
    set_limit(site.redis, "jobs", 1)
    job = site.submit("a")
    site.redis.rpoplpush("rq:queue:chat:fake", keys.quarantine("chat:fake"))
    with pytest.raises(JobError, match=r"the limit \(jobs\) is 1"):
        site.submit("b")
    assert job.cancel()
    assert job.status() == "cancelled"
    site.submit("b")


def test_a_requeued_job_has_its_limits_again(site: Site) -> None:
    job, kept = site.submit("a", ttl=0.05), site.submit("b", ttl=3600)
    store = JobStore(site.redis, ["fake"], "w1", "rq:worker:w1")
    before = site.redis.hgetall(keys.OPEN_BYTES)
    assert kept.cancel()

    def has_failed() -> bool:
        store.maintenance.step()
        return job.status() == "failed"

    wait_until(has_failed)
    assert not site.redis.exists(keys.OPEN_BYTES, keys.DEADLINES)
    for one in (job, kept):
        assert run_sync(requeue(one.id), site.client.connection)
    assert site.redis.hgetall(keys.OPEN_BYTES) == before
    assert site.redis.zcard(keys.DEADLINES) == 2
    wait_until(has_failed)  # it lives as long again
    site.burst()
    assert kept.result(timeout=PATIENCE).text
    assert not site.redis.exists(keys.OPEN_BYTES, keys.DEADLINES)


def test_a_purged_job_frees_its_bytes(site: Site) -> None:
    job = site.submit("a", ttl=3600)
    fetch(site, job).cancel()  # RQ's own
    assert run_sync(purge(job.id), site.client.connection)
    assert not site.redis.exists(keys.OPEN_BYTES, keys.DEADLINES, job_key(job.id))


def test_a_model_may_have_limits_of_its_own(site: Site) -> None:
    set_limit(site.redis, "jobs", 0)
    set_limit(site.redis, "jobs", 1, model="fake")
    site.submit("a")
    with pytest.raises(JobError, match=r"the limit \(jobs\) is 1"):
        site.submit("b")
    set_limit(site.redis, "jobs", None, model="fake")
    with pytest.raises(JobError, match=r"the limit \(jobs\) is 0"):
        site.submit("b")


def test_the_limit_of_bytes_counts_jobs_until_they_end(site: Site) -> None:
    set_limit(site.redis, "bytes", 50_000)
    first, second = prompts(2, 40_000)
    site.submit(first)
    with pytest.raises(JobError, match=r"kB of requests, and the limit \(bytes\) is 50\.0 kB"):
        site.submit(second)
    site.burst()
    site.submit(second).cancel()
    job = site.submit(first)
    with pytest.raises(JobError, match="kB of requests"):
        site.submit(second)
    # RQ's tools remove jobs without counting: an empty queue has no bytes.
    site.redis.delete(job_key(job.id), "rq:queue:chat:fake")
    site.submit(second)


def test_a_refused_batch_says_how_many_are_enqueued(site: Site) -> None:
    set_limit(site.redis, "jobs", 2)
    with pytest.raises(JobError) as caught:
        site.submit_many(["a", "b", "c", "d"])
    assert caught.value.code == "queue_full"
    assert caught.value.message.startswith("request 2 (and 1 more): the queue of model 'fake'")
    assert caught.value.message.endswith("; 2 of 4 requests are enqueued")
    assert site.redis.llen("rq:queue:chat:fake") == 2


def finished(claimed: ClaimedJob) -> Settlement:
    completion = ChatCompletion(
        id="x",
        created=1,
        model="fake",
        choices=[Choice(index=0, message=AssistantMessage(content="a"), finish_reason="stop")],
        usage=Usage(prompt_tokens=1, completion_tokens=1, total_tokens=2),
    )
    return settlement_of(claimed, completion, None, worker="w")


def record(site: Site) -> None:
    """Write all rows to Parquet."""
    site.folder.mkdir(exist_ok=True)
    (site.folder / ID_FILE).write_text("id")
    folder = ResultsFolder(site.folder, "id")
    recorder = Recorder(Client(site.url).redis, folder, name="r", idle=lambda: True)
    recorder.start()
    assert recorder.finish(lambda fault: False)
