"""Workers with five models of which two fit into memory, while jobs come at random and workers are
killed: each job ends once, with its answer."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.client.job import Job
from tests.worker.fake_backend import text_of
from tests.worker.site import PATIENCE, Site, WorkerProcess

MODELS = ["one", "two", "three", "four", "five"]
BUDGET = 250  # for two of them; the backend fails a load beyond it
JOBS_PER_SECOND = 15.0


@pytest.fixture
def site(redis_url: str, tmp_path: Path) -> Iterator[Site]:
    site = Site(redis_url, tmp_path)
    yield site
    site.close()


def start(site: Site) -> WorkerProcess:
    return site.worker(
        models=MODELS, budget=BUDGET, load_seconds=0.2, max_wait=1.0, lease_seconds=2.0
    )


def swap(site: Site, seconds: float, kills: int, seed: int) -> None:
    choose = random.Random(seed)
    workers, ended = [start(site) for _ in range(2)], []
    site.wait_for_workers(2)
    begin = time.monotonic()
    kill_at = sorted(choose.uniform(0.2, 0.9) * seconds for _ in range(kills))
    jobs: list[Job] = []
    while (now := time.monotonic() - begin) < seconds:
        jobs.append(site.submit(f"{len(jobs)}", model=choose.choice(MODELS)))
        if kill_at and now >= kill_at[0]:
            kill_at.pop(0)
            victim = workers.pop(choose.randrange(len(workers)))
            victim.kill()
            ended.append(victim)
            workers.append(start(site))
        time.sleep(choose.expovariate(JOBS_PER_SECOND))
    for job in jobs:
        assert job.result(timeout=PATIENCE).text == text_of(job.request)
    for worker in workers:
        assert worker.stop() == 0
    output = "".join(worker.output for worker in (*workers, *ended))
    assert output.count("loaded ") > len(MODELS)  # they did swap
    assert "failed" not in output and "Traceback" not in output


def test_workers_that_are_killed_during_swaps_lose_no_job(site: Site) -> None:
    swap(site, seconds=4.0, kills=1, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_half_an_hour_of_swaps_loses_no_job(site: Site) -> None:
    swap(site, seconds=1800.0, kills=60, seed=random.randrange(1000))
