"""Jobs of dead workers, and claims whose reply was lost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jobs import JobError, keys
from jobs.client.job import Job
from jobs.store.claimed_job import ClaimedJob
from jobs.store.job_store import JobStore
from jobs.store.workers import Workers
from tests.worker.site import Site, wait_until
from worker.queue.attempt import SettlementBuilder
from worker.queue.reaper import MAX_LOST, Reaper

QUEUE = "rq:queue:chat:fake"
LEASE_SECONDS = 0.3


def store(site: Site, name: str) -> JobStore:
    return JobStore(site.redis, ["fake"], name, f"rq:worker:{name}")


@pytest.fixture
def workers(site: Site) -> Iterator[Workers]:
    workers = Workers(site.url, "w1", ["chat:fake"], patience=5.0)
    yield workers
    workers.close()


@pytest.fixture
def reaper(site: Site, workers: Workers) -> Reaper:
    settlements = SettlementBuilder("w1", "host", {})
    return Reaper(store(site, "w1"), workers, settlements, LEASE_SECONDS)


def bury(site: Site, reaper: Reaper, name: str) -> None:
    """Reap until a dead worker is removed."""

    def is_gone() -> bool:
        reap(site, reaper)
        return site.redis.zscore(keys.WORKERS, name) is None

    wait_until(is_gone, f"{name} is not removed")
    site.redis.zrem(keys.WORKERS, "w1")


def reap(site: Site, reaper: Reaper) -> None:
    """Reap once. The reaper's worker renews its own lease."""
    site.redis.zincrby(keys.WORKERS, 1, "w1")
    reaper.reap(set())


def waiting(site: Site) -> list[str]:
    return [name.decode() for name in site.redis.lrange(QUEUE, 0, -1)]


def quarantined(site: Site) -> list[str]:
    return [name.decode() for name in site.redis.lrange(keys.quarantine("chat:fake"), 0, -1)]


def ids(jobs: list[Job]) -> list[str]:
    return [job.id for job in jobs]


def claim_suspects(site: Site, name: str) -> list[ClaimedJob]:
    return store(site, name).claim(lambda *_: 100, suspects=True).jobs


def test_a_claim_whose_reply_was_lost_is_returned(site: Site, reaper: Reaper) -> None:
    jobs = site.submit_many(["a", "b", "c"])
    known, *_ = store(site, "w1").claim(lambda *_: 3).jobs
    reaper.reap({known.lease})
    assert waiting(site) == [jobs[1].id, jobs[2].id]
    assert "chatjobs_lost" not in site.hash(jobs[1])


def test_jobs_of_a_dead_worker_are_returned_in_their_order(site: Site, reaper: Reaper) -> None:
    jobs = site.submit_many([f"q{i}" for i in range(4)])
    store(site, "dead").claim(lambda *_: 3)
    bury(site, reaper, "dead")
    assert waiting(site) == ids(jobs)
    assert [site.hash(job).get("chatjobs_lost") for job in jobs] == ["1", "1", "1", None]


def test_jobs_of_an_alive_worker_are_kept(site: Site, reaper: Reaper) -> None:
    jobs = site.submit_many(["a", "b"])
    store(site, "alive").claim(lambda *_: 1)
    store(site, "dead").claim(lambda *_: 1)
    alive = Workers(site.url, "alive", [], patience=5.0)

    def is_gone() -> bool:
        alive.renew(60.0, stopping=False)
        reap(site, reaper)
        return site.redis.zscore(keys.WORKERS, "dead") is None

    wait_until(is_gone)
    alive.close()
    assert waiting(site) == [jobs[1].id]


def test_jobs_of_a_worker_that_announced_its_end_are_not_to_blame(
    site: Site, reaper: Reaper
) -> None:
    jobs = site.submit_many(["a", "b"])
    store(site, "dead").claim(lambda *_: 2)
    leaving = Workers(site.url, "dead", [], patience=5.0)
    leaving.renew(0.1, stopping=True)
    leaving.close()
    bury(site, reaper, "dead")
    assert waiting(site) == ids(jobs)
    assert "chatjobs_lost" not in site.hash(jobs[0])
    assert not site.redis.exists(keys.STOPPING)


def test_a_dead_worker_leaves_no_name(site: Site, reaper: Reaper) -> None:
    doomed = site.worker()
    wait_until(lambda: site.client.redis.exists("rq:workers:bulk:fake"))
    site.wait_for_workers()
    (name,) = [name.decode() for name in site.redis.zrange(keys.WORKERS, 0, -1)]
    doomed.kill()
    bury(site, reaper, name)
    left = [key for key in site.redis.scan_iter("*worker*") if b"worker.tasks." not in key]
    assert not left, "a name of the worker is left"


def test_one_worker_is_elected(site: Site, workers: Workers) -> None:
    other = Workers(site.url, "w2", [], patience=5.0)
    assert workers.elect_reaper(60.0)
    assert not other.elect_reaper(60.0)
    assert workers.elect_reaper(60.0)
    assert 0 < site.redis.ttl(keys.REAPER) <= 60
    site.redis.delete(keys.REAPER)
    assert other.elect_reaper(60.0)
    other.close()


def test_a_job_fails_when_too_many_workers_died_with_it(site: Site, reaper: Reaper) -> None:
    job = site.submit()
    for lost in range(MAX_LOST):
        (claimed,) = claim_suspects(site, f"dead{lost}")
        assert claimed.suspect == (lost == MAX_LOST - 1)
        bury(site, reaper, f"dead{lost}")
    with pytest.raises(JobError, match="its last three workers died") as failure:
        job.result(timeout=1)
    assert failure.value.code == "worker_lost"
    assert waiting(site) == quarantined(site) == []
    assert site.redis.xlen(keys.outbox("default")) == 1


def test_suspects_are_halved_until_one_is_alone(site: Site, reaper: Reaper) -> None:
    """One of eight jobs kills every worker that runs it: it alone fails."""
    jobs = site.submit_many([f"q{i}" for i in range(8)])
    poison = jobs[5]
    later = site.submit("later")
    for lost in range(2):
        store(site, f"dead{lost}").claim(lambda *_: 8)
        bury(site, reaper, f"dead{lost}")
    assert waiting(site) == [later.id]
    assert quarantined(site) == ids(jobs)
    sizes, innocent = [], []
    for number in range(100):
        if poison.status().over:
            break
        group = claim_suspects(site, f"runner{number}")
        sizes.append(len(group))
        if poison.id in [one.lease.job for one in group]:
            bury(site, reaper, f"runner{number}")
        else:
            innocent += [one.lease.job for one in group]
            site.redis.delete(keys.started(f"runner{number}"))  # they have ended
    assert sizes == [4, 4, 2, 1, 1]
    assert poison.status().value == "failed"
    left = quarantined(site)
    assert sorted(innocent + left) == sorted(set(ids(jobs)) - {poison.id})
    assert waiting(site) == [later.id]


def test_suspects_wait_for_a_worker_that_runs_nothing_else(site: Site, reaper: Reaper) -> None:
    (suspect,) = site.submit_many(["suspect"])
    for lost in range(2):
        store(site, f"dead{lost}").claim(lambda *_: 1)
        bury(site, reaper, f"dead{lost}")
    bulk, chat = site.submit("bulk", priority="bulk"), site.submit("chat")
    busy = store(site, "busy").claim(lambda _, bulk: 0 if bulk else 1).jobs
    assert [one.lease.job for one in busy] == [chat.id]
    (claimed,) = store(site, "idle").claim(lambda *_: 8, suspects=True).jobs
    assert claimed.lease.job == suspect.id
    assert claimed.suspect
    store(site, "idle").leases.give_back([claimed.lease])
    assert quarantined(site) == [suspect.id]
    assert site.redis.lrange("rq:queue:bulk:fake", 0, -1) == [bulk.id.encode()]


def test_own_jobs_are_returned_in_their_order_and_counted(site: Site, reaper: Reaper) -> None:
    jobs = site.submit_many(["a", "b", "c"])
    claimed = store(site, "w1").claim(lambda *_: 2).jobs
    reaper.reclaim_own([job.lease for job in claimed])
    assert waiting(site) == ids(jobs)
    assert [site.hash(job).get("chatjobs_lost") for job in jobs] == ["1", "1", None]
