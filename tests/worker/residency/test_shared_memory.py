"""A worker whose models share the memory for their caches."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jobs.store.worker_status import CacheStatus, read_workers
from tests.worker.site import Site, wait_until
from worker.demo import MODEL_DIR
from worker.device import Device, choose_device
from worker.engine.footprint import footprint
from worker.model_spec import ModelSpec

WORDS = 100  # of a prompt


def test_memory_follows_the_jobs_of_two_models(site: Site, tmp_path: Path) -> None:
    """Of the demo and a copy. Their caches are small, and each wants all at times."""
    twin = tmp_path / "twin"
    shutil.copytree(MODEL_DIR, twin)
    spec = ModelSpec(reference="demo", dtype="fp32", max_batch=4)
    found = footprint(spec, Device(choose_device("cpu")), None, preempt=True)
    total = 6 * found.least_cache
    budget = 2 * (found.weights + found.activations) + total
    models = ["demo", str(twin)]
    worker = site.worker(real=True, models=models, pinned=True, memory=budget, lease_seconds=30.0)
    site.wait_for_workers()

    def caches() -> dict[str, CacheStatus]:
        return read_workers(site.redis)[0]["memory"].get("caches", {})

    def submit(model: str, first: int) -> Iterator[Any]:
        for one in range(first, first + 24):
            text = " ".join(map(str, range(one, one + WORDS)))
            yield site.submit(text, model=model, max_tokens=4)

    # One by one: how much stays after jobs that run together depends on how many do.
    for job in submit("demo", 0):
        job.result(timeout=600)
    wait_until(lambda: caches()["demo"]["used"] > total // 4 and not caches()["twin"]["used"])
    for job in submit("twin", 100):
        job.result(timeout=600)
    wait_until(lambda: caches()["twin"]["used"] > total // 4)
    assert caches()["demo"]["used"] <= total - caches()["twin"]["used"]
    for job in [*submit("demo", 200), *submit("twin", 300)]:
        assert job.result(timeout=600).choices[0].finish_reason
    assert sum(one["used"] for one in caches().values()) <= total
    assert {one["least"] for one in caches().values()} == {found.least_cache}
    assert worker.stop() == 0
