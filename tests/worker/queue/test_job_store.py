"""Only the holder of a lease settles or returns its job, and only once."""

from __future__ import annotations

from typing import Any

import pytest

from jobs import JobError, keys
from jobs.client.job import Job
from jobs.store.claimed_job import ClaimedJob
from jobs.store.job_store import JobStore
from jobs.store.leases import LOST_SECONDS, Leases, StartedJob
from jobs.store.rq_layout import results_key
from jobs.store.settlement import Settlement
from jobs.store.workers import DeadWorker
from tests.worker.site import Site
from worker.queue.attempt import SettlementBuilder

QUEUE = "rq:queue:chat:fake"


def store(site: Site, name: str) -> JobStore:
    return JobStore(site.redis, ["fake"], name, f"rq:worker:{name}")


def die(site: Site, name: str) -> DeadWorker:
    """A worker whose lease is not renewed any more."""
    site.redis.zadd(keys.WORKERS, {name: 5})
    return DeadWorker(name, 5)


@pytest.fixture
def a(site: Site) -> JobStore:
    return store(site, "a")


@pytest.fixture
def b(site: Site) -> JobStore:
    return store(site, "b")


def claim(by: JobStore, count: int = 1) -> list[ClaimedJob]:
    return by.claim(lambda *_: count).jobs


def ended(claimed: ClaimedJob, code: Any = "timeout") -> Settlement:
    error = JobError(code, "as the test wants")
    return SettlementBuilder("a", "host", {}).for_error(claimed, error)


def dump(site: Site) -> dict[bytes, bytes]:
    return {key: site.redis.dump(key) for key in site.redis.scan_iter("*")}


def waiting(site: Site) -> list[str]:
    return [name.decode() for name in site.redis.lrange(QUEUE, 0, -1)]


def ids(jobs: list[Job]) -> list[str]:
    return [job.id for job in jobs]


def test_a_lost_lease_changes_nothing(site: Site, a: JobStore, b: JobStore) -> None:
    site.submit()
    (old,) = claim(a)
    a.leases_of(die(site, "a")).reclaim([StartedJob(old.lease, 1)])
    (new,) = claim(b)
    before = dump(site)
    assert a.settle([ended(old)]) == [False]
    a.leases.give_back([old.lease])
    assert a.leases.retry(old.lease, 5, 0.0, [])  # True: another worker has the job
    a.leases.reclaim([StartedJob(old.lease, 2)])
    assert a.leases.check([old.lease, new.lease]) == [(False, False), (True, False)]
    assert dump(site) == before


def test_a_claim_leaves_jobs_whose_sequences_have_no_room(site: Site, a: JobStore) -> None:
    """They are neither read nor given back, so their attempts are not counted."""
    items = [{"type": "loglikelihood", "prompt": "a", "continuations": ["b", "c"]}] * 3
    jobs = site.client.submit_many([{"model": "fake", "items": items} for _ in range(3)])
    site.submit(n=4)
    claimed = a.claim(lambda *_: 8).jobs
    assert [one.lease.job for one in claimed] == [one.id for one in jobs[:2]]
    assert len(waiting(site)) == 2
    site.redis.hset(f"rq:job:{jobs[2].id}", "chatjobs_cost", "foreign")
    assert [one.lease.attempt for one in a.claim(lambda *_: 2).jobs] == [1, 1]


def test_a_claim_of_the_last_job_deletes_the_tokens(site: Site, a: JobStore) -> None:
    site.submit_many(["a", "b", "c"])
    wake = keys.wake("chat:fake")
    claim(a, 2)
    assert site.redis.llen(wake) == 3
    claim(a)
    assert not site.redis.exists(wake)
    site.redis.set(wake, "foreign")
    assert claim(a) == []
    assert site.redis.get(wake) == b"foreign"


def test_tokens_stay_while_suspects_wait(site: Site, a: JobStore) -> None:
    quarantine = keys.quarantine(keys.chat_queue("fake"))
    site.redis.rpush(quarantine, "suspect")
    site.submit()
    claim(a)
    assert site.redis.llen(keys.wake("chat:fake")) == 1


def test_a_job_that_returns_to_its_queue_wakes_a_worker(site: Site, a: JobStore) -> None:
    wake = keys.wake("chat:fake")
    for how in ("given back", "retried", "delayed"):
        site.submit()
        (claimed,) = claim(a)
        site.redis.delete(wake)
        if how == "given back":
            a.leases.give_back([claimed.lease], undo_attempt=True)
        else:
            assert a.leases.retry(claimed.lease, 5, 60.0 if how == "delayed" else 0.0, [])
        assert site.redis.llen(wake) == (0 if how == "delayed" else 1), how
        claim(a)


def test_a_job_is_settled_once(site: Site, a: JobStore) -> None:
    site.submit()
    (claimed,) = claim(a)
    assert a.settle([ended(claimed)]) == [True]
    before = dump(site)
    assert a.settle([ended(claimed)]) == [False]  # as repeated after a lost connection
    assert dump(site) == before
    assert site.redis.xlen(keys.outbox("default")) == 1


def test_a_lost_lease_does_not_affect_other_settlements(site: Site, a: JobStore) -> None:
    jobs = site.submit_many(["a", "b", "c"])
    claimed = claim(a, 3)
    a.leases.give_back([claimed[1].lease])
    assert a.settle([ended(one) for one in claimed]) == [True, False, True]
    assert [job.status().value for job in jobs] == ["failed", "queued", "failed"]


def test_an_alive_worker_keeps_its_jobs(site: Site, a: JobStore, b: JobStore) -> None:
    site.submit()
    (claimed,) = claim(a)
    seen = die(site, "a")
    site.redis.zadd(keys.WORKERS, {"a": 6})  # it has renewed its lease since
    before = dump(site)
    b.leases_of(seen).reclaim([StartedJob(claimed.lease, 1)])
    b.leases_of(seen).give_back([claimed.lease])
    assert b.settle([ended(claimed, "worker_lost")], dead=seen) == [False]
    assert dump(site) == before


def test_two_reapers_return_a_job_once(site: Site, a: JobStore) -> None:
    job = site.submit()
    (claimed,) = claim(a)
    dead = die(site, "a")
    b, c = Leases(site.redis, dead), Leases(site.redis, dead)
    (seen,) = b.started()
    assert seen == StartedJob(claimed.lease, 0)
    for one in (b, c, b):
        one.reclaim([StartedJob(seen.lease, 1)])
    assert waiting(site) == [job.id]
    assert site.hash(job)["chatjobs_lost"] == "1"
    assert b.started() == []


def test_the_jobs_of_a_worker_are_those_that_it_holds(site: Site, a: JobStore, b: JobStore) -> None:
    jobs = site.submit_many(["a", "b", "c", "d"])
    one, two, three = claim(a, 3)
    claim(b)
    assert [job.lease for job in a.leases.started()] == [one.lease, two.lease, three.lease]
    assert [job.lease.job for job in b.leases.started()] == [jobs[3].id]
    a.settle([ended(one)])
    a.leases.give_back([two.lease])
    assert [job.lease for job in a.leases.started()] == [three.lease]
    site.redis.zrem("rq:wip:chat:fake", three.lease.member)  # as RQ's cancel does
    a.leases.forget([three.lease])
    assert not site.redis.exists(keys.started("a"))


def test_deaths_of_long_ago_do_not_count(site: Site, a: JobStore) -> None:
    job = site.submit()
    claim(a)
    now, _ = site.redis.time()
    for age, counts in ((10, 2), (LOST_SECONDS + 10, 0)):
        lost = {"chatjobs_lost": 2, "chatjobs_lost_at": int(now - age)}
        site.redis.hset(f"rq:job:{job.id}", mapping=lost)
        assert [one.lost for one in a.leases.started()] == [counts]


def test_a_job_that_ended_with_an_error_is_no_suspect(site: Site, a: JobStore) -> None:
    job = site.submit()
    (claimed,) = claim(a)
    a.leases_of(die(site, "a")).reclaim([StartedJob(claimed.lease, 2, "g")])
    assert waiting(site) == []
    (claimed,) = a.claim(lambda *_: 1, suspects=True).jobs
    assert claimed.suspect
    assert a.leases.retry(claimed.lease, 1, 0.0, [])
    assert waiting(site) == [job.id]
    assert "chatjobs_lost" not in site.hash(job)


def test_returned_jobs_keep_their_order_at_the_front(site: Site, a: JobStore) -> None:
    jobs = site.submit_many([f"q{i}" for i in range(6)])
    claimed = claim(a, 4)
    a.leases.give_back([one.lease for one in claimed])
    assert waiting(site) == ids(jobs)
    assert site.hash(jobs[0])["chatjobs_attempt"] == "1"  # kept: the attempt may have published
    assert not site.redis.exists("rq:wip:chat:fake", f"rq:executions:{jobs[0].id}")
    assert not list(site.redis.scan_iter("rq:execution:*"))
    claim(a, 2)
    assert site.hash(jobs[0])["chatjobs_attempt"] == "2"


def test_an_attempt_that_has_not_started_does_not_count(site: Site, a: JobStore) -> None:
    job = site.submit()
    (claimed,) = claim(a)
    a.leases.give_back([claimed.lease], undo_attempt=True)
    assert site.hash(job)["chatjobs_attempt"] == "0"
    (again,) = claim(a)
    assert again.lease.attempt == 1
    assert again.lease != claimed.lease


def test_started_jobs_are_in_the_order_of_their_claims(site: Site, a: JobStore) -> None:
    names = [f"{i:02}" for i in range(30)]
    for name in reversed(names):
        site.submit(id=name)
    claim(a, 12)
    claim(a, 18)
    assert [one.lease.job for one in a.leases.started()] == names[::-1]


def test_a_retry_goes_to_the_end_until_none_is_left(site: Site, a: JobStore) -> None:
    first, second = site.submit_many(["a", "b"])
    (claimed,) = claim(a)
    assert a.leases.retry(claimed.lease, 1, 0.0, [])
    assert waiting(site) == [second.id, first.id]
    (claimed,) = claim(a, 2)[1:]
    assert claimed.retried == 1
    assert not a.leases.retry(claimed.lease, 1, 0.0, [])
    assert a.leases.check([claimed.lease]) == [(True, False)]


@pytest.mark.parametrize("over", ["finished", "failed", "canceled", "stopped"])
def test_an_id_queued_twice_runs_once(site: Site, a: JobStore, over: str) -> None:
    job, next_one = site.submit_many(["a", "b"])
    site.redis.lpush(QUEUE, job.id)
    (claimed,) = claim(a)
    assert [one.lease.job for one in claim(a)] == [next_one.id]
    assert a.settle([ended(claimed)]) == [True]
    site.redis.hset(f"rq:job:{job.id}", "status", over)
    site.redis.rpush(QUEUE, job.id)
    assert claim(a) == []
    assert waiting(site) == []


def test_a_started_job_without_execution_is_claimed(site: Site, a: JobStore) -> None:
    job = site.submit()
    site.redis.hset(f"rq:job:{job.id}", "status", "started")  # as left by a dead stock worker
    assert [one.lease.job for one in claim(a)] == [job.id]


def test_a_cancellation_is_seen(site: Site, a: JobStore) -> None:
    job = site.submit()
    (claimed,) = claim(a)
    assert a.leases.check([claimed.lease]) == [(True, False)]
    assert job.cancel()
    assert a.leases.check([claimed.lease]) == [(True, True)]


def test_a_deleted_job_leaves_its_row_and_no_hash(site: Site, a: JobStore) -> None:
    job = site.submit()
    (claimed,) = claim(a)
    site.redis.delete(f"rq:job:{job.id}")
    assert a.settle([ended(claimed)]) == [True]
    assert not site.redis.exists(f"rq:job:{job.id}", results_key(job.id))
    assert site.redis.xlen(keys.outbox("default")) == 1
    assert not site.redis.exists("rq:failed:chat:fake")


def test_interactive_jobs_take_the_room_of_bulk_jobs_but_the_last_place(
    site: Site, a: JobStore
) -> None:
    chats, bulks = site.submit_many(["a"] * 6), site.submit_many(["b"] * 3, priority="bulk")
    assert [one.lease.job for one in claim(a, 3)] == ids(chats[:3])
    saturated = a.claim(lambda _, bulk: 1 if bulk else 2).jobs
    assert [one.lease.job for one in saturated] == ids(chats[3:5] + bulks[:1])
    assert [one.lease.job for one in claim(a, 3)] == ids(chats[5:] + bulks[1:])
