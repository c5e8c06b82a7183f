"""`chatjobs jobs`: jobs by state, run, error and age; requeue, cancel and purge."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from jobs import Client, Job, JobError, keys
from jobs.api.params import RequestFields
from jobs.operations import CHAT
from jobs.store import find_jobs
from jobs.store.requeue import REQUEUE, RequeueArgs, RequeueKeys
from jobs.store.rq_layout import encode_call
from tests.cli.conftest import Run
from tests.jobs.conftest import StepwiseWorker
from tests.waiting import PATIENCE

REQUEST: RequestFields = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
LOST = JobError("worker_lost", "three workers died")


@pytest.fixture
def client(redis_url: str) -> Iterator[Client]:
    with Client(redis_url) as client:
        client.serving = None
        yield client


@pytest.fixture
def worker(redis_url: str) -> Iterator[StepwiseWorker]:
    worker = StepwiseWorker(redis_url)
    yield worker
    worker.redis.close()


def submit(client: Client, name: str, run: str | None = None, model: str = "m") -> Job:
    return client.submit({**REQUEST, "model": model, "job": {"id": name, "run": run}})


def fail(client: Client, worker: StepwiseWorker, name: str, error: JobError = LOST) -> Job:
    job = submit(client, name, "r")
    worker.start(job.id)
    worker.fail(job.id, error)
    return job


@pytest.fixture
def five(client: Client, worker: StepwiseWorker) -> None:
    """One job in each state."""
    submit(client, "waits", model="other")
    worker.start(submit(client, "runs").id)
    client.redis.zadd("rq:wip:chat:m", {"runs:execution": 2e9})  # as a real claim does
    worker.start(submit(client, "done").id)
    worker.finish("done", "x")
    fail(client, worker, "fails")
    submit(client, "stopped").cancel()


def listed(run: Run, url: str, *words: str) -> list[str]:
    lines = run("jobs", "list", "--json", *words, "--redis", url).stdout.splitlines()
    return [json.loads(line)["id"] for line in lines]


@pytest.mark.usefixtures("five")
def test_jobs_are_listed_by_state_run_model_code_and_age(
    run: Run, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(find_jobs, "PAGE", 1)
    assert sorted(listed(run, redis_url)) == ["done", "fails", "runs", "stopped", "waits"]
    assert listed(run, redis_url, "--state", "queued") == ["waits"]
    assert listed(run, redis_url, "--state", "started") == ["runs"]
    assert sorted(listed(run, redis_url, "--state", "finished", "--state", "cancelled")) == [
        "done",
        "stopped",
    ]
    assert listed(run, redis_url, "--run", "r") == ["fails"]
    assert listed(run, redis_url, "--model", "other") == ["waits"]
    assert listed(run, redis_url, "--code", "worker_lost") == ["fails"]
    assert listed(run, redis_url, "--older", "1000") == []
    assert len(listed(run, redis_url, "--limit", "2")) == 2
    table = run("jobs", "list", "--state", "failed", "--redis", redis_url).stdout
    assert "fails" in table and "worker_lost: three workers died" in table


def test_jobs_are_listed_newest_first_over_all_queues_and_states(
    run: Run, client: Client, worker: StepwiseWorker, redis_url: str
) -> None:
    for name in ("first", "second"):
        submit(client, name, model=f"z-{name}")
    for name in ("third", "fourth"):
        fail(client, worker, name)
    submit(client, "fifth", model="a")
    worker.start(submit(client, "sixth", "r").id)
    worker.finish("sixth", "x")
    client.redis.hset("rq:job:third", "ended_at", "2026-01-01T00:00:00.000000Z")
    client.redis.zadd("rq:failed:chat:m", {"third": 9e9})  # it is kept for longer than the others
    names = ["sixth", "fifth", "fourth", "second", "first", "third"]
    assert listed(run, redis_url) == names
    assert listed(run, redis_url, "--limit", "2") == names[:2]
    assert listed(run, redis_url, "--state", "failed", "--limit", "1") == ["fourth"]
    lines = run("jobs", "list", "--limit", "5", "--redis", redis_url).stdout.splitlines()
    assert [line.split()[0] for line in lines[1:]] == names[:5]


def hash_reads(client: Client) -> int:
    found = client.redis.info("commandstats").get("cmdstat_hmget", {"calls": 0})
    return int(found["calls"])


def test_the_newest_of_many_jobs_are_found_without_a_read_of_all(
    run: Run, client: Client, redis_url: str
) -> None:
    many = 3 * find_jobs.NEWEST
    client.submit_many({**REQUEST, "job": {"id": f"j{number}"}} for number in range(many))
    before = hash_reads(client)
    assert listed(run, redis_url, "--limit", "3") == [f"j{many - n}" for n in (1, 2, 3)]
    assert hash_reads(client) - before < many / 2
    before = hash_reads(client)
    assert listed(run, redis_url, "--run", "none") == []  # any of them may be of the run
    assert hash_reads(client) - before >= many
    limit = find_jobs.NEWEST + 500
    assert len(listed(run, redis_url, "--limit", str(limit))) == limit


@pytest.mark.usefixtures("five")
def test_a_job_is_shown_with_its_error_and_request(run: Run, redis_url: str) -> None:
    shown = run("jobs", "show", "fails", "--redis", redis_url).stdout
    assert "status: failed\n" in shown
    assert "error: three workers died (worker_lost)\n" in shown
    found = json.loads(run("jobs", "show", "fails", "--json", "--redis", redis_url).stdout)
    assert found["request"]["model"] == found["model"] == "m"
    assert (found["attempt"], found["run"], found["error"]["code"]) == (1, "r", "worker_lost")
    absent = run("jobs", "show", "nobody", "--json", "--redis", redis_url)
    assert absent.exit_code == 1
    assert json.loads(absent.stderr)["error"]["code"] == "not_found"


def test_a_failed_job_is_requeued_and_runs_again(
    run: Run, client: Client, worker: StepwiseWorker, redis_url: str
) -> None:
    jobs = [fail(client, worker, name) for name in ("a", "b")]
    fail(client, worker, "c", JobError("invalid_request", "bad"))
    result = run("jobs", "requeue", "--code", "worker_lost", "--redis", redis_url)
    assert (result.exit_code, result.stderr) == (0, "2 jobs requeued\n")
    assert listed(run, redis_url, "--state", "failed") == ["c"]
    for job in jobs:
        assert job.status() == "queued"
        assert client.redis.ttl(f"rq:job:{job.id}") == -1
        attempt = worker.start(job.id)
        assert attempt == 2
        worker.write(job.id, attempt, 1, "well")
        worker.finish(job.id, "well", attempt=attempt)
        assert job.result(timeout=PATIENCE).text == "well"
        assert "".join(chunk.text for chunk in job.stream()) == "well"
    again = run("jobs", "requeue", "a", "--redis", redis_url)
    assert again.exit_code == 1
    assert "a: not requeued, it is finished" in again.stderr


@pytest.mark.usefixtures("five")
def test_jobs_are_cancelled_and_purged(run: Run, client: Client, redis_url: str) -> None:
    assert run("jobs", "cancel", "--model", "other", "--redis", redis_url).exit_code == 0
    assert client.job("waits").status() == "cancelled"
    assert "runs: not deleted, it is started" in (
        run("jobs", "purge", "runs", "--redis", redis_url).stderr
    )
    result = run("jobs", "purge", "--all", "--redis", redis_url)
    assert (result.exit_code, result.stderr) == (0, "3 jobs deleted\n")
    assert sorted(listed(run, redis_url)) == ["done", "runs"]
    for name in ("waits", "fails", "stopped"):
        assert not [key for key in client.redis.keys(f"*{name}*") if b"outbox" not in key]


def test_a_requeue_that_is_sent_twice_queues_the_job_once(
    client: Client, worker: StepwiseWorker
) -> None:
    fail(client, worker, "a")
    names = RequeueKeys(
        job="rq:job:a",
        queue="rq:queue:chat:m",
        failed="rq:failed:chat:m",
        canceled="rq:canceled:chat:m",
        open_bytes=keys.OPEN_BYTES,
        deadlines=keys.DEADLINES,
    )
    args = RequeueArgs("a", "2026-01-01T00:00:00Z", "")
    for _ in range(2):
        assert client.redis.eval(REQUEUE, len(names), *names, *args) == 1
    size = client.redis.hstrlen("rq:job:a", "data")
    assert client.redis.hgetall(keys.OPEN_BYTES) == {b"rq:queue:chat:m": str(size).encode()}
    assert client.redis.lrange("rq:queue:chat:m", 0, -1) == [b"a"]


def test_a_cancel_that_fails_names_the_key_and_works_when_it_is_renamed(
    run: Run, client: Client, redis_url: str
) -> None:
    submit(client, "waits")
    client.redis.set(keys.OUTBOXES, "foreign")
    refused = run("cancel", "waits", "--redis", redis_url)
    assert refused.exit_code == 1
    assert f"{keys.OUTBOXES} in Redis is a string instead of a set" in refused.stderr
    assert client.job("waits").status() == "queued"
    assert client.redis.lrange("rq:queue:chat:m", 0, -1) == [b"waits"]
    client.redis.rename(keys.OUTBOXES, "damaged")
    assert run("cancel", "waits", "--redis", redis_url).exit_code == 0
    assert client.job("waits").status() == "cancelled"


def test_jobs_in_quarantine_are_listed_and_counted(
    run: Run, client: Client, redis_url: str
) -> None:
    submit(client, "suspect")
    client.redis.lmove("rq:queue:chat:m", keys.quarantine("chat:m"), "LEFT", "LEFT")
    assert listed(run, redis_url, "--state", "queued") == ["suspect"]
    (queue,) = json.loads(run("status", "--json", "--redis", redis_url).stdout)["queues"]
    assert queue["queued"] == 1


@pytest.mark.parametrize("ttl", ["NaN", "Infinity", "1e300", "-1", "true"])
def test_jobs_with_a_foreign_ttl_are_requeued_without_one(
    run: Run, client: Client, worker: StepwiseWorker, redis_url: str, ttl: str
) -> None:
    for name in ("a", "b"):
        fail(client, worker, name)
    request = f'{{"model":"m","messages":[],"job":{{"run":"r","ttl":{ttl}}}}}'
    _, data = encode_call(CHAT.func, "request", request)
    client.redis.hset("rq:job:a", "data", data)
    result = run("jobs", "requeue", "--run", "r", "--redis", redis_url)
    assert (result.exit_code, result.stderr) == (0, "2 jobs requeued\n")
    assert not client.redis.exists(keys.DEADLINES)


def test_names_that_are_not_utf_8_do_not_stop_a_command(
    run: Run, client: Client, worker: StepwiseWorker, redis_url: str
) -> None:
    fail(client, worker, "a")
    client.redis.zadd("rq:failed:chat:m", {b"\xff": 2e9})
    client.redis.sadd("rq:queues", b"rq:queue:\xff", b"rq:queue:chat:\xff")
    assert listed(run, redis_url) == ["a"]
    assert run("status", "--redis", redis_url).exit_code == 0
    result = run("jobs", "requeue", "--all", "--redis", redis_url)
    assert (result.exit_code, result.stderr) == (0, "1 job requeued\n")


def test_the_number_of_jobs_to_list_has_a_limit(run: Run, redis_url: str) -> None:
    result = run("jobs", "list", "--limit", "9" * 20, "--redis", redis_url)
    assert result.exit_code == 2
    assert "is not in the range 1<=x<=" in result.stderr


@pytest.mark.parametrize("words", [(), ("a", "--all"), ("a", "--run", "r")])
def test_the_jobs_to_change_must_be_selected_in_one_way(
    run: Run, redis_url: str, words: tuple[str, ...]
) -> None:
    result = run("jobs", "requeue", *words, "--redis", redis_url)
    assert result.exit_code == 2
    assert "select the jobs" in result.stderr


@pytest.mark.usefixtures("five")
def test_an_age_of_0_selects_all_jobs_that_ended(run: Run, redis_url: str) -> None:
    result = run("jobs", "purge", "--older", "0", "--redis", redis_url)
    assert (result.exit_code, result.stderr.splitlines()[0]) == (0, "2 jobs deleted")


def test_a_pipe_gets_one_line_per_job_and_whole_values(
    run: Run, client: Client, worker: StepwiseWorker, redis_url: str
) -> None:
    long, words = "a" * 150, "of many words " * 20
    fail(client, worker, long, JobError("internal", f"the first line\n{words}"))
    lines = run("jobs", "list", "--redis", redis_url).stdout.split("\n")
    (row,) = (line for line in lines if long in line)
    assert row.endswith(f"internal: the first line {words}".rstrip())


def test_jobs_are_selected_by_tenant_and_session(run: Run, client: Client, redis_url: str) -> None:
    for name, tenant in (("one", "acme"), ("two", "other")):
        client.submit({**REQUEST, "job": {"id": name, "tenant": tenant}})
    turn = client.session("talk", model="m").submit("hi")
    assert listed(run, redis_url, "--tenant", "acme") == ["one"]
    assert listed(run, redis_url, "--session", "talk") == [turn.id]


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        (("--state", "running"), "started"),
        (("--state", "canceled"), "cancelled"),
        (("--code", "worker_los"), "worker_lost"),
    ],
)
@pytest.mark.parametrize("command", ["list", "purge", "requeue", "cancel"])
def test_a_wrong_state_or_code_is_refused_with_the_one_that_is_meant(
    run: Run, redis_url: str, command: str, option: tuple[str, str], meant: str
) -> None:
    words = ("jobs", command, "--redis", redis_url, option[0])
    refused = run(*words, option[1])
    assert refused.exit_code == 2
    assert f"'{option[1]}' is not known; did you mean '{meant}'?" in refused.stderr
    assert run(*words, meant).exit_code == 0


def test_a_change_says_how_many_jobs_only_a_state_selects(
    run: Run, client: Client, worker: StepwiseWorker, redis_url: str
) -> None:
    submit(client, "done", "r")
    worker.start("done")
    worker.finish("done", "x")
    purge = ("jobs", "purge", "--run", "r", "--redis", redis_url)
    assert run(*purge).stderr == (
        "0 jobs deleted\n1 job that is finished is not deleted: add --state finished\n"
    )
    assert run(*purge, "--state", "finished").stderr == "1 job deleted\n"
    submit(client, "stopped", "r").cancel()
    requeue = ("jobs", "requeue", "--run", "r", "--redis", redis_url)
    assert run(*requeue).stderr == (
        "0 jobs requeued\n1 job that is cancelled is not requeued: add --state cancelled\n"
    )
    assert run(*requeue, "--state", "cancelled").stderr == "1 job requeued\n"
