"""`chatjobs submit` of a file that was submitted before."""

from __future__ import annotations

import json

import pytest
from rq import Queue
from rq.job import Job as RQJob
from rq.serializers import JSONSerializer

from jobs import Client, JobError
from jobs.store.maintenance import Maintenance
from jobs.store.rq_layout import job_key
from tests.cli.conftest import Run
from tests.cli.test_jobs import client, worker
from tests.jobs.conftest import StepwiseWorker
from tests.waiting import PATIENCE

__all__ = ["client", "worker"]

LINES = '{"prompt": "one"}\n{"prompt": "two"}'


@pytest.fixture
def command(redis_url: str) -> list[str]:
    return ["submit", "-", "-m", "m", "--run", "r", "--redis", redis_url]


def test_jobs_that_were_purged_or_have_expired_are_done_before(
    run: Run, client: Client, worker: StepwiseWorker, redis_url: str, command: list[str]
) -> None:
    first = run(*command, input=LINES)
    assert first.stderr.endswith("2 jobs enqueued\n")
    finished, failed = first.stdout.split()
    worker.start(finished)
    worker.finish(finished, "x")
    worker.start(failed)
    worker.fail(failed, JobError("timeout", "too slow"))
    assert run("jobs", "purge", "--run", "r", "--redis", redis_url).exit_code == 0
    one_left = run(*command, input=LINES)
    assert one_left.stderr.endswith(
        "0 jobs enqueued; 1 job existed before; 1 was done before: its row is in run r\n"
    )
    client.redis.delete(job_key(finished))  # as when its result has expired
    again = run(*command, input=LINES)
    assert again.stdout == first.stdout
    assert again.stderr.endswith("0 jobs enqueued; 2 were done before: their rows are in run r\n")
    waited = run(*command, "--wait", input=LINES)
    assert waited.exit_code == 0
    assert waited.stdout.count("done before; its row is in run r") == 2
    found = run(*command, "--wait", "--json", input=LINES).stdout.splitlines()
    assert [json.loads(line)["status"] for line in found] == ["done", "done"]


def test_a_job_without_a_row_runs_again_after_purge(
    run: Run, client: Client, redis_url: str, command: list[str]
) -> None:
    (job,) = run(*command, input='{"prompt": "one"}').stdout.split()
    stored = RQJob.fetch(job, connection=client.redis, serializer=JSONSerializer)
    stored.cancel()
    assert run("jobs", "purge", job, "--redis", redis_url).exit_code == 0
    again = run(*command, input='{"prompt": "one"}')
    assert again.stderr.endswith("1 job enqueued\n")
    assert client.job(job).status() == "queued"


def removed_by_rq(how: str, client: Client, ids: list[str]) -> None:
    """Remove the waiting jobs with one of RQ's own tools."""
    queue = Queue("bulk:m", connection=client.redis, serializer=JSONSerializer)
    if how == "rq empty":
        queue.empty()  # type: ignore[no-untyped-call]
    for job in ids:
        if how == "Job.delete":
            RQJob.fetch(job, connection=client.redis, serializer=JSONSerializer).delete()
        elif how == "the hash":
            client.redis.delete(job_key(job))


@pytest.mark.parametrize("how", ["rq empty", "Job.delete", "the hash"])
def test_rows_whose_jobs_were_removed_before_they_ran_are_enqueued_again(
    run: Run,
    client: Client,
    worker: StepwiseWorker,
    command: list[str],
    how: str,
) -> None:
    first = run(*command, input=LINES)
    done, waiting = first.stdout.split()
    worker.start(done)
    worker.finish(done, "x")
    removed_by_rq(how, client, [waiting])
    client.redis.delete(job_key(done))  # as when its result has expired
    again = run(*command, input=LINES)
    assert again.stdout == first.stdout
    assert again.stderr.endswith("1 job enqueued; 1 was done before: its row is in run r\n")
    worker.start(waiting)
    worker.finish(waiting, "y")
    assert client.job(waiting).result(timeout=PATIENCE).text == "y"
    client.redis.delete(job_key(waiting))
    last = run(*command, input=LINES)
    assert last.stderr.endswith("0 jobs enqueued; 2 were done before: their rows are in run r\n")


@pytest.mark.parametrize("how", ["rq empty", "Job.delete", "the hash"])
def test_rows_whose_jobs_were_removed_take_a_corrected_file(
    run: Run, client: Client, command: list[str], how: str
) -> None:
    ids = run(*command, input=LINES).stdout.split()
    removed_by_rq(how, client, ids)
    corrected = run(*command, input=LINES.replace("one", "ONE"))
    assert corrected.exit_code == 0, corrected.stderr
    assert corrected.stderr.endswith("2 jobs enqueued\n")
    assert len(client.redis.lrange("rq:queue:bulk:m", 0, -1)) >= 2
    refused = run(*command, input=LINES)
    assert refused.exit_code != 0
    assert "row 0 of run 'r' is taken by another request" in refused.stderr


def test_jobs_that_rq_cancelled_are_done_once_their_row_is_written(
    run: Run, client: Client, command: list[str]
) -> None:
    (job,) = run(*command, input='{"prompt": "one"}').stdout.split()
    RQJob.fetch(job, connection=client.redis, serializer=JSONSerializer).cancel()
    Maintenance(client.redis, ["bulk:m"]).step()
    client.redis.delete(job_key(job))
    again = run(*command, input='{"prompt": "one"}')
    assert again.stderr.endswith("0 jobs enqueued; 1 was done before: its row is in run r\n")


def test_cancelled_jobs_are_done(run: Run, client: Client, command: list[str]) -> None:
    (job,) = run(*command, input='{"prompt": "one"}').stdout.split()
    client.job(job).cancel()
    client.redis.delete(job_key(job))
    again = run(*command, input='{"prompt": "one"}')
    assert again.stderr.endswith("0 jobs enqueued; 1 was done before: its row is in run r\n")
