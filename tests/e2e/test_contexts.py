"""Real workers with different contexts serve one queue: a job that is too long for one is run by a
worker with a longer context, and fails only without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jobs import JobError
from jobs.client.job import Job
from jobs.operations import CHAT
from jobs.store.worker_status import published, read_workers
from tests.worker.checkpoints import make_checkpoint
from tests.worker.site import PATIENCE, Site, WorkerProcess, wait_until

SHORT, LONG = 64, 512
LONG_PROMPT = "word " * 100
ANSWER: dict[str, Any] = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "m", num_hidden_layers=1, max_position_embeddings=LONG)


def start(site: Site, folder: Path, context: int, **options: Any) -> WorkerProcess:
    return site.worker(real=True, models=[str(folder)], context=context, **options)


def wait_for_contexts(site: Site, *contexts: int) -> dict[int, str]:
    """Until the workers publish these contexts of the model. Returns their names."""

    def found() -> dict[int, str]:
        of_workers = published(site.redis).contexts("m", CHAT.func)
        return {tokens: name for name, tokens in of_workers.items()}

    wait_until(lambda: set(found()) == set(contexts))
    return found()


def submit_long(site: Site, **fields: Any) -> Job:
    return site.submit(LONG_PROMPT, model="m", **ANSWER, **fields)


def assert_too_long(job: Job, sentence: str) -> None:
    with pytest.raises(JobError, match=sentence) as caught:
        job.result(timeout=PATIENCE)
    assert caught.value.code == "context_length_exceeded"


def left(job: Job, site: Site) -> bool:
    """True if a worker has returned a job for one with a longer context."""
    return "chatjobs_longer" in site.hash(job)


@pytest.mark.parametrize("priority", ["interactive", "bulk"])
def test_long_jobs_end_at_the_worker_with_the_longer_context(
    site: Site, folder: Path, priority: str
) -> None:
    workers = [start(site, folder, SHORT), start(site, folder, LONG)]
    names = wait_for_contexts(site, SHORT, LONG)
    longer = [submit_long(site, priority=priority, retries=0, stream=True) for _ in range(12)]
    shorter = site.submit_many(["a"] * 6, model="m", priority=priority, **ANSWER)
    for job in longer:
        chunks = list(job.stream(timeout=PATIENCE))
        assert chunks[-1].choices[0].finish_reason == "length"
    assert [job.result(timeout=PATIENCE).usage.completion_tokens for job in shorter] == [4] * 6
    assert [worker.stop() for worker in workers] == [0, 0]
    site.assert_settled([*longer, *shorter])
    rows = [site.row(job) for job in longer]
    assert {row["worker_id"] for row in rows} == {names[LONG]}
    assert {row["attempt"] for row in rows} == {1} and not any(row["failures"] for row in rows)


def test_the_short_worker_leaves_what_it_claims_and_fails_it_when_the_longer_one_dies(
    site: Site, folder: Path
) -> None:
    start(site, folder, SHORT)
    long = start(site, folder, LONG, lease_seconds=60.0)
    wait_for_contexts(site, SHORT, LONG)
    long.freeze()  # it claims nothing, and its status holds for 30 seconds
    job = submit_long(site)
    wait_until(lambda: left(job, site))
    assert not job.status().over
    long.kill()
    assert_too_long(job, f"the context holds {SHORT}")
    site.client.wait_for_rows([job], timeout=PATIENCE)
    assert site.row(job)["error_type"] == "context_length_exceeded"


def test_a_job_whose_longer_worker_dies_while_it_runs_ends_at_another_one(
    site: Site, folder: Path
) -> None:
    start(site, folder, SHORT)
    longer = [start(site, folder, LONG), start(site, folder, LONG)]
    wait_until(lambda: len(published(site.redis).contexts("m", CHAT.func)) == 3)
    pids = {one["name"]: one["pid"] for one in read_workers(site.redis)}
    by_name = {name: one for one in longer for name, pid in pids.items() if pid == one.pid}
    fields = {"model": "m", "max_tokens": 350, "ignore_eos": True}
    job = site.submit(LONG_PROMPT, **fields, stream=True)
    wait_until(lambda: site.hash(job).get("worker_name") in by_name)
    by_name[site.hash(job)["worker_name"]].kill()
    assert job.result(timeout=PATIENCE).usage.completion_tokens == 350
    site.client.wait_for_rows([job], timeout=PATIENCE)
    assert len(site.written()) == 1


def test_a_job_that_is_too_long_for_all_workers_fails_with_the_longest_context(
    site: Site, folder: Path
) -> None:
    workers = [start(site, folder, SHORT), start(site, folder, 128)]
    wait_for_contexts(site, SHORT, 128)
    jobs = [site.submit("word " * 300, model="m", **ANSWER) for _ in range(8)]
    for job in jobs:
        assert_too_long(job, "the context holds 128|the longest context of its workers is 128")
    assert [worker.stop() for worker in workers] == [0, 0]
    site.assert_settled(jobs)


def test_one_worker_alone_fails_a_job_that_is_too_long(site: Site, folder: Path) -> None:
    start(site, folder, SHORT)
    job = submit_long(site)
    assert_too_long(job, f"the context holds {SHORT}, completion included: shorten .* context$")
    assert not left(job, site)


def item(prompt: str) -> dict[str, Any]:
    return {"type": "loglikelihood", "prompt": prompt, "continuations": [" word", " words"]}


def test_a_scoring_job_with_one_long_item_ends_at_the_longer_worker(
    site: Site, folder: Path
) -> None:
    workers = [start(site, folder, SHORT), start(site, folder, LONG)]
    names = wait_for_contexts(site, SHORT, LONG)
    items = [item("a"), item(LONG_PROMPT), item("b"), item("word " * 2000)]
    requests: Any = [
        {"model": "m", "items": items, "job": {"run": "r", "row": 4 * number, "retries": 0}}
        for number in range(6)
    ]
    jobs = site.client.submit_many(requests)
    site.client.wait_for_rows(jobs, timeout=PATIENCE)
    assert [worker.stop() for worker in workers] == [0, 0]
    rows = site.rows("r")
    assert {row["worker_id"] for row in rows} == {names[LONG]}
    failed = [row["row_index"] for row in rows if row["status"] != "ok"]
    assert failed == [4 * number + 3 for number in range(6)]
    assert len(site.written("r")) == len(rows)


def test_a_scoring_job_is_run_without_its_long_item_if_no_worker_can_score_that(
    site: Site, folder: Path
) -> None:
    start(site, folder, SHORT)
    request: Any = {"model": "m", "items": [item("a"), item(LONG_PROMPT)]}
    result = site.client.submit(request).result(timeout=PATIENCE)
    assert [one.error and one.error["code"] for one in result.items] == [
        None,
        "context_length_exceeded",
    ]


def test_a_turn_that_is_too_long_moves_its_session(site: Site, folder: Path) -> None:
    short = start(site, folder, SHORT)
    wait_for_contexts(site, SHORT)
    site.client.serving = None
    session = site.client.session(model="m", **ANSWER)
    session.send("a", timeout=PATIENCE)
    start(site, folder, LONG)
    names = wait_for_contexts(site, SHORT, LONG)
    jobs = [session.submit(LONG_PROMPT)]
    jobs[0].result(timeout=PATIENCE)
    jobs.append(session.submit("b"))
    jobs[1].result(timeout=PATIENCE)
    site.client.wait_for_rows(jobs, timeout=PATIENCE)
    assert {site.row(job)["worker_id"] for job in jobs} == {names[LONG]}
    assert len(session.history()) == 6
    assert len(read_workers(site.redis)) == 2 and short.alive
