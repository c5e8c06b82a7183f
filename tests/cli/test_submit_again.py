"""`chatjobs submit` of a file whose jobs have ended, and have left Redis."""

from __future__ import annotations

import json

import pytest
from rq.job import Job as RQJob
from rq.serializers import JSONSerializer

from jobs import Client, JobError
from jobs.client.rq_format import job_key
from tests.cli.conftest import Run
from tests.cli.test_jobs import client, worker
from tests.jobs.conftest import StepwiseWorker

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
    assert one_left.stderr.endswith("1 job enqueued; 1 was done before: its row is in run r\n")
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
