"""A turn of a session is left to the worker that has its state, if that has room, for a bounded
time; any other worker takes it then."""

from __future__ import annotations

import json
import math
import time
from itertools import pairwise
from typing import Any

import pytest

from jobs import Session, keys
from jobs.client.job import Job
from jobs.store.claimed_job import ClaimedJob
from jobs.store.job_store import JobStore
from tests.worker.queue.test_job_store import claim, ended, store
from tests.worker.site import PATIENCE, Site

HELD = 0.25  # seconds, as in affinity.lua
ROOM = {"room": {"chat:fake": 4, "bulk:fake": 4}}


def open_session(site: Site, name: str | None = None) -> Session:
    site.client.serving = None
    return site.client.session(name, model="fake")


def report(site: Site, name: str, about: Any) -> None:
    site.redis.set(keys.worker(name), json.dumps(about))


def settle(by: JobStore, claimed: list[ClaimedJob]) -> None:
    assert all(by.settle([ended(one, "cancelled") for one in claimed]))


def of_a(site: Site, name: str | None = None) -> Session:
    """A session whose last turn was run by `a`, which has room."""
    session = open_session(site, name)
    session.submit("one")
    a = store(site, "a")
    settle(a, claim(a))
    report(site, "a", ROOM)
    return session


def held_by_a(site: Site, **fields: Any) -> tuple[Session, Job]:
    """Such a session, and its next turn."""
    session = of_a(site)
    return session, session.submit("two", **fields)


def ids_of(claimed: list[ClaimedJob]) -> list[str]:
    return [one.lease.job for one in claimed]


@pytest.mark.parametrize("priority", ["interactive", "bulk"])
def test_a_turn_is_left_to_the_worker_of_the_turn_before_it(site: Site, priority: str) -> None:
    _, job = held_by_a(site, job={"priority": priority})
    a, b = store(site, "a"), store(site, "b")
    jobs, held_seconds = b.claim(lambda *_: 4)
    assert not jobs and 0 < held_seconds <= HELD
    assert site.redis.lrange(keys.wake_worker("a"), 0, -1) == [b"1"]
    jobs, held_seconds = a.claim(lambda *_: 4)
    assert ids_of(jobs) == [job.id] and held_seconds == math.inf
    assert b.claim(lambda *_: 4) == ([], math.inf)


def test_another_worker_takes_a_turn_that_has_waited_and_has_its_session_then(site: Site) -> None:
    session, job = held_by_a(site)
    a, b = store(site, "a"), store(site, "b")
    jobs, held_seconds = b.claim(lambda *_: 1)
    assert not jobs
    time.sleep(held_seconds + 0.002)
    (claimed,) = claim(b)
    assert claimed.lease.job == job.id
    settle(b, [claimed])
    report(site, "b", ROOM)
    following = session.submit("three")
    assert not claim(a) and ids_of(claim(b)) == [following.id]


@pytest.mark.parametrize(
    "about",
    [
        None,
        {},
        {"room": {}},
        {"room": {"chat:fake": 0, "bulk:fake": 9}},
        {"room": {"chat:other": 4}},
        {"room": {"chat:fake": "full"}},
        {"room": [1]},
        [],
        7,
    ],
)
def test_a_turn_is_not_left_to_a_worker_that_does_not_say_that_it_has_room(
    site: Site, about: Any
) -> None:
    _, job = held_by_a(site)
    if about is None:
        site.redis.delete(keys.worker("a"))
    else:
        report(site, "a", about)
    assert ids_of(claim(store(site, "b"))) == [job.id]
    assert not site.redis.exists(keys.wake_worker("a"))


@pytest.mark.parametrize("until", ["x", "-5", "1e300", "nan"])
def test_a_foreign_time_holds_no_turn(site: Site, until: str) -> None:
    _, job = held_by_a(site)
    site.redis.hset(f"rq:job:{job.id}", "chatjobs_held", until)
    b = store(site, "b")
    claimed = claim(b) or claim(b)
    time.sleep(HELD + 0.01)
    assert ids_of(claimed or claim(b)) == [job.id]


def test_jobs_behind_turns_that_are_left_to_others_are_taken(site: Site) -> None:
    _, turn = held_by_a(site)
    behind = [site.submit(), site.submit()]
    b = store(site, "b")
    jobs, held_seconds = b.claim(lambda *_: 8)
    assert ids_of(jobs) == [job.id for job in behind] and held_seconds <= HELD
    assert ids_of(claim(store(site, "a"), 8)) == [turn.id]


def test_16_turns_of_a_list_are_passed_over(site: Site) -> None:
    sessions = [of_a(site, f"s{number}") for number in range(18)]
    turns = [session.submit("two") for session in sessions]
    site.submit()
    b = store(site, "b")
    assert not claim(b, 30)
    assert ids_of(claim(store(site, "a"), 17)) == [turn.id for turn in turns[:17]]
    assert len(claim(b, 30)) == 1


def test_a_turn_of_a_tenant_is_left_too(site: Site) -> None:
    held_by_a(site, job={"tenant": "t"})
    b = store(site, "b")
    before = site.redis.info("commandstats")["cmdstat_lindex"]["calls"]
    jobs, held_seconds = b.claim(lambda *_: 8)
    assert not jobs and held_seconds <= HELD
    assert site.redis.info("commandstats")["cmdstat_lindex"]["calls"] - before < 10


def test_other_tenants_do_not_wait_for_a_turn_that_is_left(site: Site) -> None:
    _, turn = held_by_a(site, job={"tenant": "t"})
    b = store(site, "b")
    other = site.submit(tenant="u")
    plain = site.submit()
    assert sorted(ids_of(claim(b, 8))) == sorted([other.id, plain.id])
    assert ids_of(claim(store(site, "a"), 8)) == [turn.id]
    assert not site.redis.exists(keys.TENANT_JOBS)


def test_two_workers_keep_their_sessions(site: Site) -> None:
    workers = [site.worker(lease_seconds=60.0), site.worker(lease_seconds=60.0)]
    site.wait_for_workers(2)
    sessions = [open_session(site, f"s{number}") for number in range(6)]
    turns: list[list[Job]] = []
    for turn in range(5):
        turns.append([session.submit(f"turn {turn}") for session in sessions])
        for job in turns[-1]:
            job.result(timeout=PATIENCE)
    for worker in workers:
        assert worker.stop() == 0
    rows = {row["job_id"]: row for row in site.rows()}
    moved = [
        rows[after.id]["queue_s"]
        for pair in pairwise(turns)
        for before, after in zip(*pair, strict=True)
        if rows[before.id]["worker_id"] != rows[after.id]["worker_id"]
    ]
    assert all(seconds > HELD - 0.05 for seconds in moved)  # a busy host has delayed their worker


def test_the_session_of_a_frozen_worker_goes_on(site: Site) -> None:
    holder, session = site.worker(lease_seconds=240.0), open_session(site)
    session.submit("one").result(timeout=PATIENCE)
    site.wait_for_workers()
    site.worker(lease_seconds=240.0)
    site.wait_for_workers(2)
    holder.freeze()
    try:
        job = session.submit("two")
        job.result(timeout=100)  # the frozen worker's lease has not ended
    finally:
        holder.thaw()
    assert len(session.history()) == 4
