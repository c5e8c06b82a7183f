"""The books: who holds a job may end or return it, once; nobody else changes anything."""

from __future__ import annotations

from typing import Any

import pytest

from jobs import JobError, keys
from jobs.client.client import Job
from tests.worker.site import Site
from worker.queue.attempt import Reporter
from worker.queue.rq_job import ClaimedJob
from worker.queue.rq_store import MAX_LOST, RQStore, Settlement

QUEUE = "rq:queue:chat:fake"


def ledger(site: Site, name: str, *, alive: bool = True) -> RQStore:
    """The books in the name of a worker that holds its lease, or has lost it."""
    if alive:
        site.redis.set(keys.worker(name), "{}")
    return RQStore(site.redis, ["fake"], name, f"rq:worker:{name}")


@pytest.fixture
def a(site: Site) -> RQStore:
    return ledger(site, "a")


@pytest.fixture
def b(site: Site) -> RQStore:
    return ledger(site, "b")


def claim(books: RQStore, count: int = 1) -> list[ClaimedJob]:
    return books.claim({"fake": count})


def end(claimed: ClaimedJob, code: Any = "timeout") -> Settlement:
    return Reporter("a", "host", {}).refused(claimed, JobError(code, "so it is"))


def everything(site: Site) -> dict[bytes, bytes]:
    return {key: site.redis.dump(key) for key in site.redis.scan_iter("*")}


def waiting(site: Site) -> list[str]:
    return [name.decode() for name in site.redis.lrange(QUEUE, 0, -1)]


def ids(jobs: list[Job]) -> list[str]:
    return [job.id for job in jobs]


def test_a_lost_lease_changes_nothing(site: Site, a: RQStore, b: RQStore) -> None:
    site.submit()
    (old,) = claim(a)
    site.redis.delete(keys.worker("a"))
    assert b.reclaim(old.lease, "a")
    (new,) = claim(b)
    before = everything(site)
    assert a.settle([end(old)]) == [False]
    a.give_back([old.lease])
    assert a.retry(old.lease, 5)  # nothing to do about it any more
    assert a.reclaim(old.lease, None)
    assert a.check([old.lease, new.lease]) == [(False, False), (True, False)]
    assert everything(site) == before


def test_a_job_is_settled_once(site: Site, a: RQStore) -> None:
    site.submit()
    (claimed,) = claim(a)
    assert a.settle([end(claimed)]) == [True]
    before = everything(site)
    assert a.settle([end(claimed)]) == [False]  # sent again after a lost connection
    assert everything(site) == before
    assert site.redis.xlen(keys.outbox("default")) == 1


def test_one_lost_lease_does_not_hold_up_the_others(site: Site, a: RQStore) -> None:
    jobs = site.submit_many(["a", "b", "c"])
    claimed = claim(a, 3)
    a.give_back([claimed[1].lease])
    assert a.settle([end(one) for one in claimed]) == [True, False, True]
    assert [job.status().value for job in jobs] == ["failed", "queued", "failed"]


def test_a_living_worker_keeps_its_jobs(site: Site, a: RQStore, b: RQStore) -> None:
    site.submit()
    (claimed,) = claim(a)
    before = everything(site)
    assert b.reclaim(claimed.lease, "a")
    assert b.settle([end(claimed, "worker_lost")], dead="a") == [False]
    assert everything(site) == before


def test_two_reapers_return_a_job_once(site: Site, b: RQStore) -> None:
    job = site.submit()
    dead, c = ledger(site, "dead", alive=False), ledger(site, "c")
    (claimed,) = claim(dead)
    (seen,) = b.started("chat:fake")
    assert (seen.lease, seen.worker, seen.alive) == (claimed.lease, "dead", False)
    for one in (b, c, b):
        one.reclaim(seen.lease, "dead")
    assert waiting(site) == [job.id]
    assert site.hash(job)["chatjobs_lost"] == "1"


def test_a_job_is_given_to_three_workers(site: Site, b: RQStore) -> None:
    site.submit()
    for lost in range(1, MAX_LOST + 1):
        (claimed,) = claim(ledger(site, f"dead{lost}", alive=False))
        assert b.reclaim(claimed.lease, f"dead{lost}") == (lost < MAX_LOST)
    assert b.check([claimed.lease]) == [(True, False)]  # still to be settled


def test_jobs_go_back_in_their_order_before_those_that_wait(site: Site, a: RQStore) -> None:
    jobs = site.submit_many([f"q{i}" for i in range(6)])
    claimed = claim(a, 4)
    a.give_back([one.lease for one in claimed])
    assert waiting(site) == ids(jobs)
    assert site.hash(jobs[0])["chatjobs_attempt"] == "1"  # its number stays: it may have spoken
    assert not site.redis.exists("rq:wip:chat:fake", f"rq:executions:{jobs[0].id}")
    assert not list(site.redis.scan_iter("rq:execution:*"))
    claim(a, 2)
    assert site.hash(jobs[0])["chatjobs_attempt"] == "2"


def test_an_attempt_that_was_not_begun_does_not_count(site: Site, a: RQStore) -> None:
    job = site.submit()
    (claimed,) = claim(a)
    a.give_back([claimed.lease], uncount=True)
    assert site.hash(job)["chatjobs_attempt"] == "0"
    (again,) = claim(a)
    assert again.lease.attempt == 1
    assert again.lease != claimed.lease


def test_the_order_of_claims_is_kept_in_the_books(site: Site, a: RQStore) -> None:
    names = [f"{i:02}" for i in range(30)]
    for name in reversed(names):
        site.submit(id=name)
    claim(a, 12)
    claim(a, 18)
    assert [one.lease.job for one in a.started("chat:fake")] == names[::-1]


def test_a_retry_goes_to_the_back_until_none_is_left(site: Site, a: RQStore) -> None:
    first, second = site.submit_many(["a", "b"])
    (claimed,) = claim(a)
    assert a.retry(claimed.lease, 1)
    assert waiting(site) == [second.id, first.id]
    (claimed,) = claim(a, 2)[1:]
    assert claimed.retried == 1
    assert not a.retry(claimed.lease, 1)
    assert a.check([claimed.lease]) == [(True, False)]


@pytest.mark.parametrize("over", ["finished", "failed", "canceled", "stopped"])
def test_an_id_that_was_queued_twice_is_run_once(site: Site, a: RQStore, over: str) -> None:
    job, next_one = site.submit_many(["a", "b"])
    site.redis.lpush(QUEUE, job.id)
    (claimed,) = claim(a)
    assert [one.lease.job for one in claim(a)] == [next_one.id]
    assert a.settle([end(claimed)]) == [True]
    site.redis.hset(f"rq:job:{job.id}", "status", over)
    site.redis.rpush(QUEUE, job.id)
    assert claim(a) == []
    assert waiting(site) == []


def test_a_job_that_was_left_as_started_is_taken(site: Site, a: RQStore) -> None:
    job = site.submit()
    site.redis.hset(f"rq:job:{job.id}", "status", "started")  # by a stock worker that died
    assert [one.lease.job for one in claim(a)] == [job.id]


def test_a_cancellation_is_seen(site: Site, a: RQStore) -> None:
    job = site.submit()
    (claimed,) = claim(a)
    assert a.check([claimed.lease]) == [(True, False)]
    assert job.cancel()
    assert a.check([claimed.lease]) == [(True, True)]


def test_a_job_that_was_deleted_leaves_its_row_and_no_hash(site: Site, a: RQStore) -> None:
    job = site.submit()
    (claimed,) = claim(a)
    site.redis.delete(f"rq:job:{job.id}")
    assert a.settle([end(claimed)]) == [True]
    assert not site.redis.exists(f"rq:job:{job.id}", keys.results(job.id))
    assert site.redis.xlen(keys.outbox("default")) == 1
    assert not site.redis.exists("rq:failed:chat:fake")
