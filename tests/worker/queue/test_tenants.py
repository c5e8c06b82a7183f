"""The tenants of a queue take turns, over several workers, and may be limited."""

from __future__ import annotations

from collections import Counter

import pytest

from jobs import JobError, keys
from jobs.client.job import Job
from jobs.store.claimed_job import ClaimedJob
from jobs.store.damage import find_damage
from jobs.store.job_store import JobStore
from jobs.store.leases import Leases
from jobs.store.limits import set_limit
from tests.worker.queue.rq_jobs import QUEUE, fetch
from tests.worker.queue.test_job_store import claim, die, ended, store
from tests.worker.site import Site, wait_until


def tenants_of(claimed: list[ClaimedJob]) -> str:
    return "".join(one.request["job"].get("tenant", "-") for one in claimed)


def submit(site: Site, tenant: str | None, count: int, **fields: object) -> list[Job]:
    options = {"tenant": tenant} if tenant else {}
    return site.submit_many([f"{tenant} {n}" for n in range(count)], **options, **fields)


def settle(by: JobStore, claimed: list[ClaimedJob]) -> None:
    assert all(by.settle([ended(one) for one in claimed]))


def test_tenants_take_turns_and_their_jobs_keep_their_order(site: Site, store: JobStore) -> None:
    a, b, other = submit(site, "a", 4), submit(site, "b", 2), submit(site, None, 2)
    claimed = claim(store, 8)
    assert tenants_of(claimed) == "ab-ab-aa"
    order = [one.lease.job for one in claimed]
    for jobs in (a, b, other):
        assert [job for job in order if job in {one.id for one in jobs}] == [one.id for one in jobs]
    assert not site.redis.keys("chatjobs:tenants:*") and not site.redis.exists(keys.TENANT_JOBS)


def test_a_tenant_with_10_000_jobs_delays_another_by_one_job(site: Site) -> None:
    submit(site, "big", 10_000)
    first, second = store(site, "one"), store(site, "two")
    assert tenants_of(claim(first, 3)) == "big" * 3
    submit(site, "small", 1)
    assert "small" in tenants_of(claim(second, 2))


def test_turns_go_on_over_several_workers(site: Site) -> None:
    for tenant in "abc":
        submit(site, tenant, 10)
    workers = [store(site, name) for name in ("one", "two", "three")]
    taken = [tenants_of(claim(workers[number % 3], 1)) for number in range(12)]
    assert "".join(taken) == "abc" * 4


def test_priorities_are_before_tenants(site: Site, store: JobStore) -> None:
    submit(site, "a", 2, priority="bulk")
    submit(site, "b", 2)
    assert tenants_of(claim(store, 4)) == "bbaa"


def test_a_returned_job_is_the_first_of_its_tenant(site: Site, store: JobStore) -> None:
    jobs = submit(site, "a", 3)
    claimed = claim(store, 2)
    store.leases.give_back([one.lease for one in claimed])
    assert [one.lease.job for one in claim(store, 3)] == [job.id for job in jobs]


def test_a_tenant_has_no_more_running_jobs_than_its_limit(site: Site) -> None:
    one, two = store(site, "one"), store(site, "two")
    set_limit(site.redis, "tenant_running", 2)
    set_limit(site.redis, "tenant_running", 1, tenant="b")
    submit(site, "a", 5)
    submit(site, "b", 5)
    submit(site, None, 5)
    first = claim(one, 6)
    assert Counter(tenants_of(first)) == {"a": 2, "b": 1, "-": 3}
    assert tenants_of(claim(two, 6)) == "--"
    settle(one, [next(job for job in first if job.request["job"].get("tenant") == "a")])
    assert tenants_of(claim(two, 6)) == "a"
    one.leases.give_back([job.lease for job in first if job.request["job"].get("tenant") == "b"])
    assert tenants_of(claim(two, 6)) == "b"


def test_jobs_of_a_dead_worker_do_not_count_as_running(site: Site) -> None:
    set_limit(site.redis, "tenant_running", 1)
    submit(site, "a", 2)
    claim(store(site, "dead"), 1)
    assert claim(store(site, "alive"), 1) == []
    leases = Leases(site.redis, die(site, "dead"))
    leases.reclaim(leases.started())
    assert len(claim(store(site, "alive"), 2)) == 1


def test_jobs_that_rq_has_ended_do_not_count_as_running(site: Site, store: JobStore) -> None:
    set_limit(site.redis, "tenant_running", 1)
    jobs = submit(site, "a", 2)
    claim(store, 1)
    assert claim(store, 1) == []
    fetch(site, jobs[0]).delete()
    assert [one.lease.job for one in claim(store, 1)] == [jobs[1].id]


def test_a_waiting_job_of_a_tenant_is_cancelled_and_counted(site: Site) -> None:
    first, second = submit(site, "a", 2)
    assert second.cancel() and second.status() == "cancelled"
    assert site.redis.hget(keys.TENANT_JOBS, QUEUE) == b"1"
    assert first.cancel()
    assert not site.redis.exists(keys.TENANT_JOBS, keys.tenants(QUEUE))


def test_waiting_jobs_of_tenants_count_for_the_limit_of_a_model(site: Site) -> None:
    set_limit(site.redis, "jobs", 3)
    submit(site, "a", 2)
    submit(site, None, 1)
    with pytest.raises(JobError, match="3 jobs that have not ended"):
        submit(site, "b", 1)


def test_workers_serve_all_tenants(site: Site) -> None:
    jobs = [job for tenant in ("a", "b", None) for job in submit(site, tenant, 5)]
    site.burst()
    assert {job.status().value for job in jobs} == {"finished"}
    tenants = {row["job_id"]: row["tenant"] for row in site.rows()}
    assert [tenants[job.id] for job in jobs] == ["a"] * 5 + ["b"] * 5 + [None] * 5


def test_a_tenant_that_is_no_name_is_refused(site: Site) -> None:
    with pytest.raises(JobError, match=r"job.tenant: must have 1 to 100 ASCII characters"):
        submit(site, "two words", 1)


def submit_one_each(site: Site, tenants: list[str]) -> None:
    message = {"role": "user", "content": "hi"}
    site.client.submit_many(
        [{"model": "fake", "messages": [message], "job": {"tenant": name}} for name in tenants]
    )


def test_tenants_at_their_limit_delay_nobody(site: Site, store: JobStore) -> None:
    set_limit(site.redis, "tenant_running", 0)
    set_limit(site.redis, "tenant_running", 9, tenant="vip")
    submit_one_each(site, [f"t{number}" for number in range(250)])
    submit(site, "vip", 1)
    submit(site, None, 1)
    assert sorted([tenants_of(claim(store, 1)), tenants_of(claim(store, 1))]) == ["-", "vip"]
    submit(site, "vip", 1)
    before = site.redis.info("commandstats")["cmdstat_zadd"]["calls"]
    assert tenants_of(claim(store, 1)) == "vip"
    assert site.redis.info("commandstats")["cmdstat_zadd"]["calls"] - before < 20


def test_a_tenant_at_its_limit_is_next_when_one_of_its_jobs_ends(site: Site) -> None:
    one = JobStore(site.redis, ["fake", "other"], "one", "rq:worker:one")
    set_limit(site.redis, "tenant_running", 1)
    names = [f"t{number}" for number in range(30)]
    submit_one_each(site, names)
    running = claim(one, 30)
    submit_one_each(site, names)
    submit(site, "t20", 1, model="other")
    assert claim(one, 30) == []
    ended_now = [job for job in running if job.request["job"]["tenant"] in ("t20", "t21")]
    settle(one, ended_now)
    again = claim(one, 30)
    assert {job.request["job"]["tenant"] for job in again} == {"t20", "t21"}
    settle(one, again)
    assert [job.lease.queue for job in claim(one, 30)] == ["chat:other"]


def test_a_new_limit_of_tenants_holds_at_once(site: Site, store: JobStore) -> None:
    set_limit(site.redis, "tenant_running", 0)
    submit_one_each(site, [f"t{number}" for number in range(50)])
    assert claim(store, 50) == []
    set_limit(site.redis, "tenant_running", 1, tenant="t40")
    assert tenants_of(claim(store, 50)) == "t40"
    site.redis.hset(keys.LIMITS, "tenant_running:t30", 1)  # by another program
    claims = [tenants_of(claim(store, 50)) for _ in range(20)]
    assert [tenants for tenants in claims if tenants] == ["t30"]
    set_limit(site.redis, "tenant_running", None)
    assert len(claim(store, 50)) == 48


def test_colons_in_names_do_not_mix_the_jobs_of_two_models(site: Site, store: JobStore) -> None:
    (one,) = submit(site, "y", 1, model="fake:x")
    (two,) = submit(site, "x:y", 1)
    assert [job.lease.job for job in claim(store, 5)] == [two.id]
    other = JobStore(site.redis, ["fake:x"], "w2", "rq:worker:w2")
    assert [job.lease.job for job in claim(other, 5)] == [one.id]
    assert not site.redis.exists(keys.TENANT_JOBS, keys.tenants(QUEUE), keys.tenants("chat:fake:x"))


def test_a_claim_forgets_running_jobs_that_rq_has_deleted(site: Site, store: JobStore) -> None:
    for _ in range(5):
        (job,) = submit(site, "a", 1)
        claim(store, 1)
        fetch(site, job).delete()
    submit(site, "a", 1)
    (last,) = claim(store, 1)
    assert site.redis.smembers(keys.tenant_running("a")) == {last.lease.entry.encode()}
    assert site.redis.ttl(keys.tenant_running("a")) > 0


@pytest.mark.parametrize("key", [keys.tenant_running("a"), keys.tenant_queue("chat:fake", "a")])
def test_a_foreign_key_of_a_tenant_stops_that_tenant_alone(site: Site, key: str) -> None:
    site.redis.hset(keys.LIMITS, "tenant_running", 2)
    jobs = [submit(site, tenant, 2) for tenant in ("a", None, "b")]
    if site.redis.exists(key):
        site.redis.rename(key, "aside")
    site.redis.set(key, "of another program")
    worker = site.worker()
    wait_until(lambda: all(job.status().over for of_tenant in jobs[1:] for job in of_tenant))
    assert not any(job.status().over for job in jobs[0])
    assert key in [damage.key for damage in find_damage(site.redis)]
    if site.redis.exists("aside"):
        site.redis.rename("aside", key)  # at once: a tenant without a list would leave its queue
    else:
        site.redis.delete(key)
    wait_until(lambda: all(job.status().over for job in jobs[0]))
    assert worker.stop() == 0
