"""Real workers on a real Redis, killed and frozen: no job is lost, no row is written twice."""

from __future__ import annotations

import random
import signal
import threading
import time
from pathlib import Path

import pytest

from jobs import Client, JobError, keys
from jobs.client.job import Job
from jobs.embedded import EmbeddedRedis
from jobs.store.leases import Leases, StartedJob
from jobs.store.rq_layout import results_key
from jobs.store.workers import DeadWorker
from jobs.stream.entries import END_SEQ
from tests.worker.fake_backend import text_of
from tests.worker.site import PATIENCE, Site, wait_until
from worker.queue.reaper import MAX_LOST

QUEUE = "rq:queue:chat:fake"


class Follower(threading.Thread):
    """Follows a job's stream; `text` is what a plain loop has at its end."""

    def __init__(self, url: str, job: str) -> None:
        super().__init__(daemon=True)
        self._url, self._job = url, job
        self.text = ""
        self.error: JobError | None = None
        self.start()

    def run(self) -> None:
        with Client(self._url) as client:
            try:
                for chunk in client.job(self._job).stream():
                    self.text += chunk.text
            except JobError as error:
                self.error = error


def kill_and_freeze(
    site: Site, rng: random.Random, jobs: list[Job], seconds: float, workers: int
) -> None:
    """Kill and freeze workers at random for `seconds`; then let the others finish."""
    options = {"delay": 0.004, "max_batch": 8}
    first = [site.worker(**options) for _ in range(workers)]
    wait_until(lambda: site.redis.zcard("rq:wip:chat:fake"))
    for worker in first:  # at least one of them runs jobs, however long the others take to start
        worker.kill()
    running = [site.worker(**options) for _ in range(workers)]
    wait_until(lambda: any(" serves " in worker.output for worker in running))
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(rng.uniform(0.1, 0.5))
        number = rng.randrange(workers)
        fault = rng.random()
        if fault < 0.5:
            running[number].kill()
        elif fault < 0.85:
            running[number].freeze()
            time.sleep(rng.uniform(0.9, 1.6))  # about the length of a lease
            running[number].thaw()
            continue
        else:
            running[number].stop()
        running[number] = site.worker(**options)
    wait_until(lambda: all(job.status().over for job in jobs), "a job did not end")
    for worker in running:
        assert worker.stop() == 0, worker.output


def check_faults(site: Site, seed: int, count: int, seconds: float) -> None:
    rng = random.Random(seed)
    chats = site.submit_many([f"chat {i}" for i in range(count // 2)], words=60, run="r")
    bulk = site.submit_many(
        [f"bulk {i}" for i in range(count // 2)],
        words=30,
        run="r",
        priority="bulk",
        first_row=count // 2,
    )
    cancelled = rng.sample(chats + bulk, count // 20)
    followers = {job.id: Follower(site.url, job.id) for job in chats[:20] + chats[-20:]}
    canceller = threading.Timer(seconds / 2, lambda: [job.cancel() for job in cancelled])
    canceller.start()
    kill_and_freeze(site, rng, chats + bulk, seconds, workers=3)
    canceller.join()
    site.burst()  # write the rows that are left in the outbox
    site.assert_settled(chats + bulk, "r")
    rows = {row["job_id"]: row for row in site.rows("r")}
    assert any(row["attempt"] > 1 for row in rows.values()), "no worker died with a job"
    for job in chats + bulk:
        if rows[job.id]["status"] == "ok":
            assert rows[job.id]["text"] == job.result(timeout=PATIENCE).text == text_of(job.request)
        elif rows[job.id]["error_type"] == "worker_lost":  # three workers have died with it
            lost = [one for one in rows[job.id]["failures"] if one["code"] == "worker_lost"]
            assert len(lost) >= MAX_LOST
        else:
            assert rows[job.id]["error_type"] == "cancelled"
    for name, follower in followers.items():
        follower.join(timeout=PATIENCE)
        assert not follower.is_alive(), f"the stream of {name} has not ended"
        if rows[name]["status"] == "ok":
            assert follower.error is None
            assert follower.text == rows[name]["text"]
        else:
            assert follower.error is not None


def test_kills_and_freezes_lose_nothing_and_repeat_nothing(site: Site) -> None:
    check_faults(site, seed=1, count=500, seconds=5.0)


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("seed", range(2, 40))
def test_many_kills_and_freezes(tmp_path: Path, seed: int) -> None:
    with EmbeddedRedis(append_only=bool(seed % 2)) as server:
        site = Site(server.url, tmp_path / "results")
        try:
            check_faults(site, seed, count=6000, seconds=60.0)
        finally:
            site.close()


# --- one fault at a time --------------------------------------------------------------------------


def test_jobs_of_a_killed_worker_go_to_another_in_their_order(site: Site) -> None:
    jobs = site.submit_many([f"q{i}" for i in range(12)], words=100_000)
    doomed = site.worker(delay=0.01)
    wait_until(lambda: sum(job.status().value == "started" for job in jobs) == 8)
    doomed.kill()
    other = site.worker(models=["fake"], max_batch=1, delay=0.01)  # runs one job, returns the rest
    wait_until(lambda: site.redis.llen(QUEUE) == 11)
    (running,) = [job.id for job in jobs if job.status().value == "started"]
    # It claimed that one before it returned the jobs of the dead worker to the front.
    wait_until(lambda: {site.hash(job).get("chatjobs_lost") for job in jobs[:8]} == {"1"})
    waiting = [name.decode() for name in site.redis.lrange(QUEUE, 0, -1)]
    assert waiting == [job.id for job in jobs if job.id != running]
    other.kill()


def test_a_frozen_worker_that_comes_back_writes_nothing(site: Site) -> None:
    job = site.submit(words=1000)
    frozen = site.worker(delay=0.01)
    wait_until(lambda: site.redis.xlen(keys.log(job.id)) > 2)
    frozen.freeze()
    site.worker()
    assert job.result(timeout=PATIENCE).text == text_of(job.request)
    wait_until(lambda: site.rows())
    before = [site.redis.dump(key) for key in (keys.log(job.id), results_key(job.id))]
    frozen.thaw()
    time.sleep(1.5)
    assert frozen.alive
    after = [site.redis.dump(key) for key in (keys.log(job.id), results_key(job.id))]
    assert after == before
    assert site.hash(job)["chatjobs_attempt"] == "2"
    assert frozen.stop() == 0
    assert f"lost the lease of job {job.id}" in frozen.output or "taken over" in frozen.output
    site.assert_settled([job])


def test_a_frozen_worker_claims_its_own_job_again(site: Site) -> None:
    job = site.submit(words=1000)
    worker = site.worker(delay=0.01)
    wait_until(lambda: site.redis.xlen(keys.log(job.id)) > 2)
    worker.freeze()
    ((name, lease),) = site.redis.zrange(keys.WORKERS, 0, -1, withscores=True)
    leases = Leases(site.redis, DeadWorker(name.decode(), int(lease)))
    (stale,) = leases.started()
    leases.reclaim([StartedJob(stale.lease, 1)])
    worker.thaw()
    assert job.result(timeout=PATIENCE).text == text_of(job.request)
    last, _ = site.redis.xrevrange(keys.log(job.id), count=1)[0]
    assert last == f"2-{END_SEQ}".encode()
    assert worker.stop() == 0
    site.assert_settled([job])


def test_a_job_that_kills_its_workers_is_failed_after_three(site: Site) -> None:
    poison = site.submit("poison", kill=1)
    for lost in range(1, MAX_LOST + 1):
        assert site.worker(max_batch=1).wait() == -signal.SIGKILL
        assert poison.status().value == "started"
        if lost < MAX_LOST:  # the next worker returns it when the lease has expired
            assert site.hash(poison).get("chatjobs_lost", "0") == str(lost - 1)
    good = site.submit("good")
    site.worker()
    assert good.result(timeout=PATIENCE).text == text_of(good.request)
    with pytest.raises(JobError, match="check their logs") as failure:
        poison.result(timeout=PATIENCE)
    assert failure.value.code == "worker_lost"
    assert site.redis.zscore("rq:failed:chat:fake", poison.id)
    with pytest.raises(JobError, match="worker_lost"):
        list(poison.stream())
    wait_until(lambda: len(site.rows()) == 2)
    row = site.row(poison)
    assert row["error_type"] == "worker_lost"
    assert [(one["attempt"], one["code"]) for one in row["failures"]] == [
        (attempt, "worker_lost") for attempt in range(1, MAX_LOST + 1)
    ]
    assert len({one["worker"] for one in row["failures"]}) == MAX_LOST


def test_other_jobs_of_killed_workers_do_not_fail(site: Site) -> None:
    """After two deaths all of them are suspects: they run in halves, until the cause is alone."""
    before = site.submit_many([f"before {i}" for i in range(3)], words=400)
    poison = site.submit("poison", kill=1)
    after = site.submit_many([f"after {i}" for i in range(3)], words=400)
    deaths = 0
    while deaths < 10:  # one worker at a time: another one might find a slow one dead
        worker = site.worker(delay=0.004, max_batch=16)
        while worker.alive and not poison.status().over:
            time.sleep(0.05)
        if worker.alive:
            break
        deaths += 1
    assert deaths >= MAX_LOST
    for job in before + after:
        assert job.result(timeout=PATIENCE).text == text_of(job.request)
    with pytest.raises(JobError) as failure:
        poison.result(timeout=PATIENCE)
    assert failure.value.code == "worker_lost"


# --- shutdown -------------------------------------------------------------------------------------


def test_sigterm_returns_unfinished_jobs_in_their_order(site: Site) -> None:
    short = site.submit_many(["a", "b"], words=20)
    long = site.submit_many([f"q{i}" for i in range(6)], words=100_000)
    waiting = site.submit_many([f"w{i}" for i in range(5)], words=5)
    bulk = site.submit_many(["x"], words=5, priority="bulk")
    worker = site.worker(delay=0.02, grace=6.0)
    wait_until(lambda: site.redis.llen(QUEUE) == 5)
    wait_until(lambda: all(site.redis.xlen(keys.log(job.id)) > 2 for job in short))
    assert worker.stop() == 0
    assert [job.status().value for job in short] == ["finished"] * 2
    assert [name.decode() for name in site.redis.lrange(QUEUE, 0, -1)] == [
        job.id for job in long + waiting
    ]
    assert bulk[0].status().value == "queued"
    assert not {"chatjobs_lost", "chatjobs_retried"} & site.hash(long[0]).keys()
    assert {row["job_id"] for row in site.rows()} == {job.id for job in short}
    assert not list(site.redis.scan_iter("rq:wip:*")) + list(site.redis.scan_iter("rq:exec*"))
    assert not list(site.redis.scan_iter("*:workers*")), "a name of the worker is left"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_worker_at_once(site: Site, number: signal.Signals) -> None:
    jobs = site.submit_many([f"q{i}" for i in range(8)], words=100_000)
    worker = site.worker(delay=0.02, grace=3600.0, abort_seconds=PATIENCE)
    wait_until(lambda: all(job.status().value == "started" for job in jobs))
    worker.send(number)
    time.sleep(0.5)
    assert worker.alive
    worker.send(number)
    assert worker.wait() == 0
    assert [name.decode() for name in site.redis.lrange(QUEUE, 0, -1)] == [job.id for job in jobs]


def test_a_second_signal_does_not_wait_for_redis(site: Site) -> None:
    with EmbeddedRedis() as server:
        other = Site(server.url, site.folder)
        jobs = other.submit_many(["a", "b"], words=100_000)
        worker = other.worker(grace=3600.0, abort_seconds=PATIENCE)
        wait_until(lambda: all(job.status().value == "started" for job in jobs))
        server.stop()
        time.sleep(1.0)
        worker.send(signal.SIGTERM)
        time.sleep(0.2)
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0
        assert "other workers get 2 jobs when this worker's lease expires" in worker.output
        other.close()


def test_an_idle_worker_stops_at_once(site: Site) -> None:
    worker = site.worker(grace=3600.0)
    site.wait_for_workers()
    assert worker.stop() == 0


def test_a_burst_ends_when_no_worker_has_a_job(site: Site) -> None:
    jobs = site.submit_many([f"q{i}" for i in range(4)], words=100_000)
    doomed = site.worker(delay=0.05)
    wait_until(lambda: all(job.status().value == "started" for job in jobs))
    burst = site.worker(burst=True)
    time.sleep(1.5)
    assert burst.alive
    for job in jobs[1:]:
        job.cancel()
    doomed.kill()
    wait_until(lambda: int(site.hash(jobs[0])["chatjobs_attempt"]) >= 2)
    jobs[0].cancel()
    assert burst.wait() == 0
    site.assert_settled(jobs)
