"""A job that is too long for a worker waits for one with a longer context, and keeps its place."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from jobs import keys
from jobs.client.job import Job
from jobs.store.connection.protocol import run_sync
from jobs.store.job_store import JobStore
from jobs.store.requeue import requeue
from tests.worker.queue.test_job_store import claim, store, waiting
from tests.worker.queue.test_session_workers import ids_of, open_session, report, settle
from tests.worker.site import Site

SHORT, LONG, NEEDED = {"fake": 100}, {"fake": 400}, 200


def short(by: JobStore, count: int = 8) -> list[str]:
    """The ids of the jobs that a worker with a short context claims."""
    return ids_of(by.claim(lambda *_: count, SHORT).jobs)


def long(by: JobStore, count: int = 8, *, suspects: bool = False) -> list[str]:
    return ids_of(by.claim(lambda *_: count, LONG, suspects=suspects).jobs)


def leave(site: Site, *jobs: Job, to: str = "b") -> None:
    """`a` claims these jobs, the next ones, and leaves them to a worker with a longer context."""
    report(site, to, {"contexts": LONG})
    a = store(site, "a")
    claimed = a.claim(lambda *_: len(jobs), SHORT).jobs
    assert ids_of(claimed) == [job.id for job in jobs]
    for one in claimed:
        a.leases.leave_to(one.lease, to, NEEDED)


def test_a_job_is_left_to_the_longer_worker_which_is_woken(site: Site) -> None:
    job = site.submit()
    leave(site, job)
    assert site.redis.lrange(keys.wake_worker("b"), 0, -1) == [b"1"]
    assert store(site, "a").claim(lambda *_: 8, SHORT) == ([], 1.0)
    (claimed,) = store(site, "b").claim(lambda *_: 8, LONG).jobs
    assert (claimed.lease.job, claimed.lease.attempt) == (job.id, 1)
    assert store(site, "a").claim(lambda *_: 8, SHORT) == ([], math.inf)


def test_any_worker_with_such_a_context_takes_it(site: Site) -> None:
    job = site.submit()
    leave(site, job)
    assert long(store(site, "c")) == [job.id]


def test_a_worker_that_does_not_know_its_context_takes_it(site: Site) -> None:
    job = site.submit()
    leave(site, job)
    assert ids_of(claim(store(site, "c"))) == [job.id]


@pytest.mark.parametrize(
    "status",
    [
        *(None, "x", [], 7, {}, {"contexts": 7}, {"contexts": {"fake": "x"}}),
        *({"contexts": {"other": 400}}, {"contexts": {"fake": NEEDED - 1}}),
    ],
)
def test_a_worker_that_no_longer_has_the_context_holds_no_job(site: Site, status: Any) -> None:
    job = site.submit()
    leave(site, job)
    if status is None:
        site.redis.delete(keys.worker("b"))
    else:
        report(site, "b", status)
    assert short(store(site, "a")) == [job.id]


def test_a_worker_that_publishes_nothing_now_holds_it_until_it_is_removed(site: Site) -> None:
    job = site.submit()
    leave(site, job)
    site.redis.zadd(keys.WORKERS, {"b": 1})  # a lease that has run out: Redis was away
    site.redis.delete(keys.worker("b"))
    assert store(site, "a").claim(lambda *_: 8, SHORT) == ([], 1.0)
    site.redis.zrem(keys.WORKERS, "b")
    assert short(store(site, "a")) == [job.id]


@pytest.mark.parametrize("value", ["", "x", "200", "-5 b", "1e300 b", "nan b", "99 b", "200 z"])
def test_a_foreign_value_holds_no_job(site: Site, value: str) -> None:
    job = site.submit()
    report(site, "b", {"contexts": LONG})
    site.redis.hset(f"rq:job:{job.id}", "chatjobs_longer", value)
    assert short(store(site, "a")) == [job.id]


def test_jobs_behind_those_that_are_left_are_taken(site: Site) -> None:
    jobs = site.submit_many(["1", "2", "3"])
    leave(site, *jobs)
    behind = site.submit_many(["4", "5"])
    assert short(store(site, "a")) == [job.id for job in behind]
    assert long(store(site, "b")) == [job.id for job in jobs]


def test_jobs_that_are_left_keep_their_order(site: Site) -> None:
    first, second, third, plain = (site.submit(str(number)) for number in range(4))
    leave(site, first, second)
    leave(site, third)
    assert waiting(site) == [job.id for job in (first, second, third, plain)]
    assert long(store(site, "b"), 3) == [job.id for job in (first, second, third)]


def test_a_job_that_was_enqueued_before_those_that_are_left_goes_before_them(site: Site) -> None:
    a = store(site, "a")
    first, second = site.submit(), site.submit()
    report(site, "b", {"contexts": LONG})
    one, two = a.claim(lambda *_: 2, SHORT).jobs
    a.leases.leave_to(two.lease, "b", NEEDED)
    a.leases.leave_to(one.lease, "b", NEEDED)
    assert waiting(site) == [first.id, second.id]


def test_a_worker_takes_no_job_behind_256_of_a_list_that_it_leaves(site: Site) -> None:
    jobs = site.submit_many([str(number) for number in range(257)])
    leave(site, *jobs[:255])
    assert short(store(site, "a"), 1) == [jobs[255].id]
    leave(site, jobs[256])
    behind = site.submit()
    assert short(store(site, "a")) == []
    assert long(store(site, "b"), 1) == [jobs[0].id]
    assert short(store(site, "a")) == [behind.id]


def test_a_claim_looks_once_at_each_job_that_is_left(site: Site) -> None:
    leave(site, *site.submit_many([str(number) for number in range(50)]))
    site.submit_many([str(number) for number in range(20)])
    before = site.redis.info("commandstats")["cmdstat_lindex"]["calls"]
    assert len(short(store(site, "a"), 20)) == 20
    assert site.redis.info("commandstats")["cmdstat_lindex"]["calls"] - before < 80


@pytest.mark.parametrize("priority", ["interactive", "bulk"])
def test_a_job_keeps_its_priority_and_its_tenant(site: Site, priority: str) -> None:
    mine = site.submit(tenant="t", priority=priority)
    leave(site, mine)
    behind = site.submit(tenant="t", priority=priority)
    others = site.submit(tenant="u", priority=priority)
    assert sorted(short(store(site, "a"))) == sorted([behind.id, others.id])
    (claimed,) = store(site, "b").claim(lambda *_: 8, LONG).jobs
    assert claimed.lease.job == mine.id and keys.is_bulk(claimed.lease.queue) == (
        priority == "bulk"
    )
    assert not site.redis.exists(keys.TENANT_JOBS)


def test_the_session_of_a_job_does_not_hold_it_for_the_short_worker(site: Site) -> None:
    session = open_session(site)
    turn = session.submit("one")
    leave(site, turn)
    report(site, "a", {"contexts": SHORT, "room": {"chat:fake": 4}})
    b = store(site, "b")
    claimed = b.claim(lambda *_: 8, LONG).jobs
    assert ids_of(claimed) == [turn.id] and claimed[0].fault is None
    settle(b, claimed)
    report(site, "b", {"contexts": LONG, "room": {"chat:fake": 4}})
    session.submit("two")
    assert not short(store(site, "a"))  # it is held for b, which has the state of the session


def test_a_suspect_that_is_left_stays_in_quarantine(site: Site) -> None:
    job, quarantine = site.submit(), keys.quarantine("chat:fake")
    site.redis.hset(f"rq:job:{job.id}", "chatjobs_group", "g")
    site.redis.rename("rq:queue:chat:fake", quarantine)
    report(site, "b", {"contexts": LONG})
    a = store(site, "a")
    (claimed,) = a.claim(lambda *_: 8, SHORT, suspects=True).jobs
    a.leases.leave_to(claimed.lease, "b", NEEDED)
    assert site.redis.lrange(quarantine, 0, -1) == [job.id.encode()]
    assert not a.claim(lambda *_: 8, SHORT, suspects=True).jobs
    assert long(store(site, "b"), suspects=True) == [job.id]


def test_a_requeued_job_is_taken_by_any_worker(site: Site) -> None:
    job = site.submit()
    leave(site, job)
    b = store(site, "b")
    settle(b, b.claim(lambda *_: 1, LONG).jobs)
    assert run_sync(requeue(job.id), site.client.connection)
    assert "chatjobs_longer" not in site.hash(job)
    assert short(store(site, "a")) == [job.id]


def test_a_lost_lease_leaves_nothing(site: Site) -> None:
    job = site.submit()
    a = store(site, "a")
    (claimed,) = a.claim(lambda *_: 1, SHORT).jobs
    a.leases.give_back([claimed.lease])
    before = json.dumps(site.hash(job))
    a.leases.leave_to(claimed.lease, "b", NEEDED)
    assert json.dumps(site.hash(job)) == before
