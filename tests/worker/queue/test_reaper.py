"""Jobs of dead workers, and claims whose reply was lost."""

from __future__ import annotations

import pytest

from jobs import JobError, keys
from tests.worker.site import Site
from worker.queue.attempt import SettlementBuilder
from worker.queue.reaper import Reaper
from worker.queue.rq_store import MAX_LOST, RQStore

QUEUE = "rq:queue:chat:fake"


def store(site: Site, name: str) -> RQStore:
    return RQStore(site.redis, ["fake"], name, f"rq:worker:{name}")


@pytest.fixture
def reaper(site: Site) -> Reaper:
    site.redis.set(keys.worker("w1"), "{}")
    return Reaper(store(site, "w1"), SettlementBuilder("w1", "host", {}), "w1")


def waiting(site: Site) -> list[str]:
    return [name.decode() for name in site.redis.lrange(QUEUE, 0, -1)]


def test_a_claim_whose_reply_was_lost_is_returned(site: Site, reaper: Reaper) -> None:
    jobs = site.submit_many(["a", "b", "c"])
    known, *_ = store(site, "w1").claim({"fake": 3})
    reaper.reap({known.lease})
    assert waiting(site) == [jobs[1].id, jobs[2].id]
    assert "chatjobs_lost" not in site.hash(jobs[1])


def test_jobs_of_a_dead_worker_are_returned_in_their_order(site: Site, reaper: Reaper) -> None:
    jobs = site.submit_many([f"q{i}" for i in range(4)])
    store(site, "dead").claim({"fake": 3})
    reaper.reap(set())
    assert waiting(site) == [job.id for job in jobs]
    assert [site.hash(job).get("chatjobs_lost") for job in jobs] == ["1", "1", "1", None]


def test_jobs_of_an_alive_worker_are_kept(site: Site, reaper: Reaper) -> None:
    site.submit()
    site.redis.set(keys.worker("alive"), "{}")
    store(site, "alive").claim({"fake": 1})
    reaper.reap(set())
    assert waiting(site) == []


def test_a_job_fails_when_too_many_workers_died_with_it(site: Site, reaper: Reaper) -> None:
    job = site.submit()
    for lost in range(MAX_LOST):
        assert waiting(site) == [job.id]
        store(site, f"dead{lost}").claim({"fake": 1})
        reaper.reap(set())
    with pytest.raises(JobError, match="its last three workers died") as failure:
        job.result(timeout=1)
    assert failure.value.code == "worker_lost"
    assert waiting(site) == []
    assert site.redis.xlen(keys.outbox("default")) == 1


def test_own_jobs_are_returned_in_their_order_and_counted(site: Site, reaper: Reaper) -> None:
    jobs = site.submit_many(["a", "b", "c"])
    claimed = store(site, "w1").claim({"fake": 2})
    reaper.reclaim_own([job.lease for job in claimed])
    assert waiting(site) == [job.id for job in jobs]
    assert [site.hash(job).get("chatjobs_lost") for job in jobs] == ["1", "1", None]
