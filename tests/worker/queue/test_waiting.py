"""The jobs that wait for models, as the planner of a worker reads them."""

from __future__ import annotations

from jobs import keys
from jobs.store.queue_depths import read_queues
from jobs.store.rq_layout import queue_key
from jobs.store.waiting import read_waiting
from tests.worker.site import Site


def test_jobs_of_all_queues_and_tenants_of_a_model_are_counted(site: Site) -> None:
    assert read_waiting(site.redis, ["one", "two"]) == {}
    site.submit("a", model="one")
    site.submit("b", model="one", priority="bulk")
    site.submit("c", model="one", tenant="acme")
    site.submit("d", model="two", tenant="acme")
    found = read_waiting(site.redis, ["one", "two", "three"])
    assert {name: one.jobs for name, one in found.items()} == {"one": 3, "two": 1}
    assert 0 < found["two"].oldest < found["one"].oldest < 60
    depths = {one["name"]: one["queued"] for one in read_queues(site.redis)}
    assert depths == {"chat:one": 2, "bulk:one": 1, "chat:two": 1}


def test_keys_of_other_programs_count_as_empty(site: Site) -> None:
    site.redis.set(queue_key("chat:one"), "x")
    site.redis.hset(keys.TENANT_JOBS, "bulk:one", "many")
    site.submit("a", model="two")
    site.redis.set(keys.tenants("chat:two"), "x")
    assert {*read_waiting(site.redis, ["one", "two"])} == {"two"}
