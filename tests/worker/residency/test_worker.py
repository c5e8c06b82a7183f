"""A worker whose models do not fit into its budget together."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.errors import JobError
from jobs.store.worker_status import WorkerStatus, read_workers
from tests.worker.fake_backend import FakeBackend, FakeHandle
from tests.worker.site import QUICK, Site
from worker.model_spec import ModelSpec
from worker.residency.policy import ResidencyPolicy
from worker.service import serve

BUDGET = 150  # for one of two models, which take 100 and a cache


def work(site: Site, backend: FakeBackend, *models: str, **options: Any) -> None:
    specs = [ModelSpec(reference=name, aliases=(f"{name}-alias",)) for name in models]
    options = {**QUICK, "results": site.folder, "burst": True, **options}
    serve(backend, specs, redis_url=site.url, **options)


def test_interleaved_jobs_of_two_models_are_served_one_model_after_the_other(site: Site) -> None:
    backend = FakeBackend(budget=BUDGET)
    jobs = [
        site.submit_many([f"{number}"], model=("one", "two-alias")[number % 2])[0]
        for number in range(60)
    ]
    work(site, backend, "one", "two", max_wait=1e9)
    assert {job.result().choices[0].finish_reason for job in jobs} == {"stop"}
    assert backend.peak_bytes <= BUDGET
    assert [spec.reference for spec in backend.loaded] == ["one", "two"]  # one swap is enough


def test_a_model_with_jobs_makes_room_when_others_have_waited_for_too_long(site: Site) -> None:
    backend = FakeBackend(max_batch=1, delay=0.01, budget=BUDGET)
    jobs = [site.submit_many([str(number)], model="one")[0] for number in range(30)]
    late = site.submit(model="two")
    work(site, backend, "one", "two", max_wait=0.3)
    ends = [backend.begun.index(job.id) for job in jobs]
    assert backend.begun.index(late.id) < max(ends)
    assert [spec.reference for spec in backend.loaded] == ["one", "two", "one"]
    assert backend.peak_bytes <= BUDGET


def test_jobs_of_a_model_that_can_not_be_loaded_fail_with_its_reason(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.residency.executor.BACKOFF_SECONDS", (0.05, 0.1))
    backend = FakeBackend(budget=BUDGET)
    backend.missing = {"two"}
    bad, good = site.submit(model="two"), site.submit(model="one")
    work(site, backend, "one", "two")
    assert good.result()
    with pytest.raises(JobError, match="two can't be loaded") as failure:
        bad.result()
    assert failure.value.code == "unsupported_model"
    assert len([one for one in backend.loaded if one.reference == "two"]) == 3


def test_status_names_models_that_are_not_in_memory(site: Site) -> None:
    seen: list[WorkerStatus] = []

    class Looking(FakeBackend):
        def submit(self, *request: Any) -> FakeHandle:
            seen.extend(read_workers(site.redis))
            return super().submit(*request)

    site.submit(model="one")
    work(site, Looking(budget=BUDGET), "one", "two", lease_seconds=60.0)
    (status,) = seen
    assert status["states"] == {"one": "ready", "two": "cold"}
    assert status["models"] == ["one", "two"]
    assert (status["closed"], status["failing"]) == (["two", "two-alias"], [])
    takes = {"weight_bytes": 90, "share_bytes": 120, "pinned": False}
    assert status["about"] == {
        name: {"names": [name, f"{name}-alias"], **takes} for name in ("one", "two")
    }
    assert {name.partition(":")[2] for name in status["room"]} == {"one", "one-alias"}


def test_one_of_two_workers_swaps_for_a_job(site: Site) -> None:
    options = {"models": ["one", "two"], "budget": BUDGET, "load_seconds": 1.0}
    workers = [site.worker(**options, lease_seconds=10.0) for _ in range(2)]
    site.wait_for_workers(2)
    assert site.submit(model="two").result(timeout=60)
    for worker in workers:
        assert worker.stop() == 0
    assert sorted(worker.output.count("loading two") for worker in workers) == [0, 1]


def test_wishes_without_a_budget_are_refused(site: Site) -> None:
    with pytest.raises(JobError, match="need memory"):
        work(site, FakeBackend(), "one", policies={"one": ResidencyPolicy(pin=True)})
