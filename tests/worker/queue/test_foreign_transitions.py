"""A change of a job's state that a key of another type prevents changes nothing, and works later.

Each test makes one such change again and again, each time with another key that another program has
written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import redis
from rq import Queue
from rq.job import Dependency
from rq.serializers import JSONSerializer

from jobs import JobError, Session, keys
from jobs.client.job import Job
from jobs.store.claimed_job import ClaimedJob
from jobs.store.connection.protocol import run_sync
from jobs.store.job_store import JobStore
from jobs.store.leases import Leases, StartedJob
from jobs.store.purge import purge
from jobs.store.requeue import requeue
from jobs.store.rq_layout import job_key
from jobs.store.settlement import Settlement
from tests.worker.queue.rq_jobs import fetch
from tests.worker.queue.session_turns import open_session
from tests.worker.site import PATIENCE, Site
from worker.queue.attempt import SettlementBuilder

CHAT = "chat:fake"
SHARED = (
    *(keys.OUTBOXES, keys.OPEN_BYTES, keys.DEADLINES, keys.TENANT_JOBS, keys.WORKERS),
    "rq:queues",
)
OF_QUEUE = (
    *(f"rq:{name}:{CHAT}" for name in ("queue", "wip", "scheduled", "deferred")),
    *(f"rq:{name}:{CHAT}" for name in ("finished", "failed", "canceled")),
    *(keys.quarantine(CHAT), keys.tenants(CHAT), keys.wake(CHAT), keys.tenant_queue(CHAT, "t")),
    *(keys.tenant_running("t"), keys.started("w1")),
)


RUN = "r"


def keys_of(job: Job) -> list[str]:
    """Every key that a change of the job's state may write, but its hash."""
    own = (
        *(f"rq:results:{job.id}", f"rq:executions:{job.id}", f"{job_key(job.id)}:dependents"),
        *(keys.log(job.id), keys.outbox(RUN), keys.rows(RUN, 0)),
        *(keys.session("s"), keys.turns("s"), keys.open_turns("s")),
    )
    return [*SHARED, *OF_QUEUE, *own]


COUNT = len(keys_of(Job(None, "x")))  # type: ignore[arg-type]


def overwrite(site: Site, key: str) -> None:
    """Another program has written the key."""
    if site.redis.exists(key):
        site.redis.rename(key, f"aside:{key}")
    site.redis.set(key, "foreign")


def restore(site: Site, key: str, *, value: bool) -> None:
    """The key is chatjobs' again, with its `value` or without."""
    site.redis.delete(key)
    if value and site.redis.exists(f"aside:{key}"):
        site.redis.rename(f"aside:{key}", key)
    site.redis.delete(f"aside:{key}")


def dump(site: Site) -> dict[bytes, bytes]:
    wakes = (b"chatjobs:wake", b"aside:")  # a token without a job wakes a worker in vain
    found = [key for key in site.redis.scan_iter("*") if not key.startswith(wakes)]
    pipeline = site.redis.pipeline(transaction=False)
    for key in found:
        pipeline.dump(key)
    return dict(zip(found, pipeline.execute(), strict=True))


def each_foreign_key(
    site: Site, prepare: Callable[[int], Job], change: Callable[[Job], object]
) -> list[Job]:
    """`change` works, or it fails, has changed nothing, and works when the key is as it was."""
    site.client.serving = None
    jobs, failed = [], 0
    for number in range(COUNT):
        job = prepare(number)
        key = keys_of(job)[number]
        overwrite(site, key)
        before = dump(site)
        try:
            change(job)
        except (JobError, redis.ResponseError):
            failed += 1
            assert dump(site) == before, key
            restore(site, key, value=True)
            change(job)
        else:
            restore(site, key, value=key in (keys.OUTBOXES, keys.outbox(RUN)))  # rows of others
        jobs.append(job)
    assert failed > 0
    return jobs


def assert_ended_once(site: Site, jobs: list[Job]) -> None:
    """Each job has ended, with one row of its last attempt, and Redis is cleaned up."""
    site.burst()
    assert {job.id: job.status().over for job in jobs} == {job.id: True for job in jobs}
    counts = Counter(row["job_id"] for row in site.rows(RUN))
    assert counts == {job.id: 1 for job in jobs}
    for name in ("rq:wip:*", "rq:exec*", "rq:queue:*", "chatjobs:tenant:*", "chatjobs:outbox*"):
        assert list(site.redis.scan_iter(name)) == []
    assert not site.redis.exists(keys.OPEN_BYTES, keys.TENANT_JOBS, keys.DEADLINES)


STATES: dict[str, dict[str, Any]] = {
    "queued": {},
    "of a tenant": {"tenant": "t"},
    "scheduled": {"delay": 3600},
    "with a time to live": {"ttl": 3600},
}


def submit(site: Site, number: int, state: str = "queued") -> Job:
    return site.submit_many(["x"], run=RUN, first_row=number, **STATES[state])[0]


def claim(store: JobStore) -> ClaimedJob:
    (claimed,) = store.claim(lambda *_: 1).jobs
    return claimed


@pytest.mark.parametrize("state", STATES)
def test_a_submit(site: Site, state: str) -> None:
    numbers = iter(range(10_000))
    made: dict[str, Job] = {}

    def enqueue(job: Job) -> None:
        made[job.id] = submit(site, int(job.id), state)

    each_foreign_key(site, lambda number: site.client.job(str(next(numbers))), enqueue)
    for job in made.values():
        if state == "scheduled":
            job.cancel()
    assert_ended_once(site, list(made.values()))


@pytest.mark.parametrize("state", STATES)
def test_a_cancel(site: Site, state: str) -> None:
    def cancel(job: Job) -> None:
        assert job.cancel()
        assert job.status() == "cancelled"

    jobs = each_foreign_key(site, lambda number: submit(site, number, state), cancel)
    assert_ended_once(site, jobs)


@pytest.mark.parametrize("state", STATES)
def test_a_requeue(site: Site, state: str) -> None:
    def cancelled(number: int) -> Job:
        job = submit(site, number, state)
        assert job.cancel()
        return job

    def requeue_one(job: Job) -> None:
        assert run_sync(requeue(job.id), site.client.connection)
        assert job.status() == "queued"

    assert_ended_once(site, each_foreign_key(site, cancelled, requeue_one))


def test_a_purge(site: Site) -> None:
    """It leaves keys of another type alone, and fails for none of them."""
    site.client.serving = None
    for number in range(COUNT):
        job = submit(site, number)
        assert job.cancel()
        overwrite(site, key := keys_of(job)[number])
        assert run_sync(purge(job.id), site.client.connection)
        assert job.status() == "unknown"
        restore(site, key, value=True)


def give_back(store: JobStore, claimed: ClaimedJob) -> bool:
    store.leases.give_back([claimed.lease])
    return True


def suspect(site: Site, claimed: ClaimedJob) -> bool:
    """Its worker has crashed, and the job waits in quarantine."""
    Leases(site.redis, "w1").reclaim([StartedJob(claimed.lease, 1)])
    return True


ENDINGS: dict[str, Callable[[Site, JobStore, ClaimedJob], bool]] = {
    "given back": lambda site, store, one: give_back(store, one),
    "retried": lambda site, store, one: store.leases.retry(one.lease, 5, 0.0, []),
    "retried later": lambda site, store, one: store.leases.retry(one.lease, 5, 0.001, []),
    "in quarantine": lambda site, store, one: suspect(site, one),
    "settled": lambda site, store, one: store.settle([failed(one)]) == [True],
}


def failed(claimed: ClaimedJob) -> Settlement:
    error = JobError("internal", "as the test wants")
    return SettlementBuilder("w1", "host", {}).for_error(claimed, error)


@pytest.mark.parametrize("how", ENDINGS)
@pytest.mark.parametrize("state", ["queued", "of a tenant", "with a time to live"])
def test_the_end_of_an_attempt(site: Site, store: JobStore, state: str, how: str) -> None:
    started: dict[str, ClaimedJob] = {}

    def start(number: int) -> Job:
        job = submit(site, number, state)
        for other in started:  # one that was returned must not be claimed again
            if not site.client.job(other).status().over:
                site.client.job(other).cancel()
        started.clear()
        started[job.id] = claim(store)
        return job

    def end(job: Job) -> None:
        assert ENDINGS[how](site, store, started[job.id])

    jobs = each_foreign_key(site, start, end)
    assert_ended_once(site, jobs)


ROWS_OF_TWO: tuple[dict[str, Any], ...] = ({"tenant": "t"}, {"first_row": 1})


@pytest.mark.parametrize("key", [keys.TENANT_JOBS, keys.tenant_queue(CHAT, "t"), "rq:queues"])
def test_a_job_whose_time_has_come(site: Site, store: JobStore, key: str) -> None:
    due, other = (site.submit_many(["x"], run=RUN, delay=0.001, **more)[0] for more in ROWS_OF_TWO)
    site.redis.zadd(f"rq:scheduled:{CHAT}", {due.id: 1, other.id: 2}, xx=True)
    overwrite(site, key)
    before = site.redis.dump(job_key(due.id))
    with suppress(redis.ResponseError):  # no job can be queued
        store.claim(lambda *_: 0)
    assert site.redis.dump(job_key(due.id)) == before
    assert site.redis.zscore(f"rq:scheduled:{CHAT}", due.id) is not None
    if key != "rq:queues":
        assert other.status() == "queued"
    restore(site, key, value=True)
    assert_ended_once(site, [due, other])


@pytest.mark.parametrize("key", ["rq:queues", f"rq:queue:{CHAT}", f"rq:deferred:{CHAT}"])
def test_the_next_turn_of_a_session(site: Site, store: JobStore, key: str) -> None:
    session = open_session(site, "s")
    session.submit("one")
    second = session.submit("two", wait=True)
    claimed = claim(store)
    overwrite(site, key)
    assert store.settle([failed(claimed)]) == [True]
    restore(site, key, value=True)
    store.maintenance.step()
    site.burst()
    assert second.result(timeout=PATIENCE).text


def test_a_dependent_job_that_can_not_be_queued_waits_and_holds_back_no_other(
    site: Site, store: JobStore, queue: Queue
) -> None:
    site.client.serving = None
    parent = Dependency(fetch(site, site.submit()), allow_failure=True)
    other = Queue("other", connection=site.redis, serializer=JSONSerializer)
    held, free = (each.enqueue("f", depends_on=parent) for each in (other, queue))
    claimed = claim(store)
    overwrite(site, "rq:queue:other")
    assert store.settle([failed(claimed)]) == [True]
    assert held.get_status(refresh=True) == "deferred"
    assert site.redis.zscore("rq:deferred:other", held.id) is not None
    assert free.get_status(refresh=True) == "queued"
    assert site.redis.lrange(f"rq:queue:{CHAT}", 0, -1) == [free.id.encode()]


IN_THE_WAY: dict[str, Callable[[str, str, str], str]] = {
    "its own": lambda child, parent, other: job_key(child),
    "its dependencies": lambda child, parent, other: f"rq:job::{child}:dependencies",
    "the dependents": lambda child, parent, other: f"{job_key(parent)}:dependents",
    "another dependency": lambda child, parent, other: job_key(other),
    "its queue": lambda child, parent, other: f"rq:queue:{CHAT}",
    "all queues": lambda child, parent, other: "rq:queues",
}


@pytest.mark.parametrize("which", IN_THE_WAY)
def test_a_dependent_job_goes_on_when_the_key_in_its_way_is_gone(
    site: Site, store: JobStore, queue: Queue, caplog: pytest.LogCaptureFixture, which: str
) -> None:
    site.client.serving = None
    parents = [site.submit(), site.submit()]
    on = Dependency([fetch(site, one) for one in parents], allow_failure=True)
    child = queue.enqueue("f", depends_on=on)
    other, parent = claim(store), claim(store)
    assert store.settle([failed(other)]) == [True]
    key = IN_THE_WAY[which](child.id, parent.lease.job, other.lease.job)
    overwrite(site, key)
    assert store.settle([failed(parent)]) == [True]
    for _ in range(2):
        store.maintenance.step()
    waits = which != "the dependents"  # which the upkeep does not need
    named = [one for one in caplog.records if f"RENAME '{key}'" in one.getMessage()]
    assert bool(named) == waits and len(named) <= 2  # of the list and of the job
    restore(site, key, value=True)
    store.maintenance.step()
    assert child.get_status(refresh=True) == "queued"
    assert site.redis.lrange(f"rq:queue:{CHAT}", 0, -1) == [child.id.encode()]
    assert site.redis.zscore(f"rq:deferred:{CHAT}", child.id) is None


def test_a_dependent_job_waits_for_those_that_have_not_ended_or_have_failed(
    site: Site, store: JobStore, queue: Queue
) -> None:
    site.client.serving = None
    first, second = (fetch(site, site.submit()) for _ in range(2))
    held = queue.enqueue("f", depends_on=[first, second])
    allows = queue.enqueue("f", depends_on=Dependency([first, second], allow_failure=True))
    one, other = claim(store), claim(store)
    store.maintenance.step()
    assert store.settle([failed(one)]) == [True]
    store.maintenance.step()
    assert {job.get_status(refresh=True) for job in (held, allows)} == {"deferred"}
    assert store.settle([failed(other)]) == [True]
    store.maintenance.step()
    assert allows.get_status(refresh=True) == "queued"
    site.redis.delete(first.key, second.key)  # as when they have expired
    store.maintenance.step()
    assert held.get_status(refresh=True) == "deferred"


CHANGES: dict[str, Callable[[Session], object]] = {
    "a turn": lambda session: session.submit("more"),
    "undo": lambda session: session.undo(),
    "reset": lambda session: session.reset(),
    "delete": lambda session: session.delete(),
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_change_of_a_session(site: Site, how: str) -> None:
    for number, key_of in enumerate((keys.session, keys.turns, keys.open_turns)):
        session = open_session(site, f"s{number}")
        session.submit("one")
        site.burst()
        key = key_of(f"s{number}")
        overwrite(site, key)
        before = dump(site)
        try:
            CHANGES[how](session)
        except (JobError, redis.ResponseError):
            assert dump(site) == before, key
            restore(site, key, value=True)
            CHANGES[how](session)
