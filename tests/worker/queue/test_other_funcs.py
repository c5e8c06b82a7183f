"""Jobs of a function that only another version of the workers runs wait for that version.

A stock RQ worker on the queue of the function takes the part of such a worker.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rq import Queue, SimpleWorker
from rq.job import Job as RQJob
from rq.serializers import JSONSerializer

import worker.tasks
from jobs import JobError, WaitTimeout, keys
from jobs.cli import build
from jobs.client.job import Job
from jobs.operations import CHAT, OPERATIONS
from tests.worker.fake_backend import text_of
from tests.worker.site import PATIENCE, Site, wait_until

EMBED = "worker.tasks.embed"
OWN = f"chat:fake {EMBED}"  # the queue of the function
REQUEST: Any = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
FUNCS = ", ".join(sorted(OPERATIONS))
NOBODY = (
    f"no worker runs {EMBED} for 'fake' (functions run now: {FUNCS}; start a worker with "
    "the model's files, not --upstream, of a version of chatjobs that does, or end the jobs "
    "with chatjobs jobs cancel)"
)


def embed(queue: Queue, **options: Any) -> RQJob:
    return queue.enqueue(EMBED, kwargs={"request": REQUEST}, **options)


def submit_embed(site: Site, **fields: Any) -> Job:
    """A job that the client of another version has submitted."""
    job = site.submit(**fields)
    call = json.dumps([EMBED, None, [], {"request": job.request.model_dump(exclude_none=True)}])
    site.redis.hset(f"rq:job:{job.id}", "data", call)
    return job


def command(*words: str) -> Result:
    return CliRunner().invoke(build(), words)


def waiting(site: Site) -> list[str]:
    return [one.decode() for one in site.redis.lrange(f"rq:queue:{OWN}", 0, -1)]


def test_it_waits_unchanged_and_the_jobs_before_and_behind_it_end(site: Site, queue: Queue) -> None:
    before, job, after = site.submit("before"), embed(queue), site.submit("after")
    data = site.redis.hget(job.key, "data")
    site.burst()
    for chat in (before, after):
        assert chat.result(timeout=1).text == text_of(chat.request)
    assert job.get_status() == "queued"
    assert waiting(site) == [job.id]
    assert site.redis.hget(job.key, "data") == data
    assert site.redis.hget(job.key, "chatjobs_attempt") == b"0"
    assert {row["job_id"] for row in site.rows()} == {before.id, after.id}
    assert site.redis.exists(f"rq:executions:{job.id}", "rq:wip:chat:fake") == 0


def test_many_of_them_hide_no_job_and_keep_their_order(site: Site, queue: Queue) -> None:
    jobs = [embed(queue) for _ in range(100)]
    chat = site.submit()
    later = embed(queue)
    site.burst()
    assert chat.status() == "finished"
    assert waiting(site) == [job.id for job in [*jobs, later]]
    assert site.redis.llen("rq:queue:chat:fake") == 0  # no worker looks at them again


def test_of_two_workers_the_one_that_knows_the_function_runs_the_jobs(
    site: Site, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker.tasks, "embed", lambda request: "embedded", raising=False)
    site.worker()
    site.wait_for_workers()
    jobs = [embed(queue) for _ in range(5)]
    chats = site.submit_many(["a", "b"])
    wait_until(lambda: len(waiting(site)) == len(jobs))
    own = Queue(OWN, connection=site.redis, serializer=JSONSerializer)
    knows = SimpleWorker([own], connection=site.redis, serializer=JSONSerializer)
    knows.work(burst=True)
    assert [job.return_value(refresh=True) for job in jobs] == ["embedded"] * len(jobs)
    site.client.gather(*chats, timeout=PATIENCE)


@pytest.mark.parametrize("how", ["scheduled", "after a chat", "bulk"])
def test_it_waits_however_it_came_into_the_queue(site: Site, queue: Queue, how: str) -> None:
    own = OWN
    if how == "scheduled":
        job = queue.enqueue_in(timedelta(0), EMBED, request=REQUEST)
    elif how == "after a chat":
        chat = queue.enqueue(CHAT.func, request=REQUEST)
        job = embed(queue, depends_on=chat)
    else:
        own = f"bulk:fake {EMBED}"
        job = embed(Queue("bulk:fake", connection=site.redis, serializer=JSONSerializer))
    site.burst()
    assert job.get_status() == "queued"
    assert [one.decode() for one in site.redis.lrange(f"rq:queue:{own}", 0, -1)] == [job.id]


def test_an_option_that_these_workers_refuse_is_left_to_the_other_version(
    site: Site, queue: Queue
) -> None:
    job = embed(queue)
    site.redis.hset(job.key, "webhooks", '[{"url": "https://example.com"}]')
    site.burst()
    assert job.get_status() == "queued"


def test_a_tenant_and_its_bytes_move_with_it(site: Site) -> None:
    job = submit_embed(site, tenant="t")
    size = int(site.hash(job)["chatjobs_bytes"])
    site.burst()
    assert site.redis.lrange(keys.tenant_queue(OWN, "t"), 0, -1) == [job.id.encode()]
    assert site.redis.hgetall(keys.TENANT_JOBS) == {OWN.encode(): b"1"}
    assert site.redis.hgetall(keys.OPEN_BYTES) == {f"rq:queue:{OWN}".encode(): str(size).encode()}
    assert job.cancel()
    assert not site.redis.exists(keys.TENANT_JOBS, keys.OPEN_BYTES)


def test_one_that_was_cancelled_before_a_worker_looked_ends_as_cancelled(
    site: Site, queue: Queue
) -> None:
    job = embed(queue)
    site.redis.hset(job.key, "chatjobs_cancel", 1)
    site.burst()
    assert job.get_status() == "canceled"
    assert site.rows()[0]["status"] == "cancelled"


def test_its_time_to_live_ends_it(site: Site) -> None:
    job = submit_embed(site, ttl=1)
    site.worker()
    with pytest.raises(JobError, match="ttl of 1 s") as caught:
        job.result(timeout=PATIENCE)
    assert caught.value.code == "timeout"


def test_status_and_waits_say_that_no_worker_runs_it_and_cancel_ends_it(
    site: Site, queue: Queue
) -> None:
    name = embed(queue).id
    site.worker(lease_seconds=60.0)  # in the status for half of that without a report
    site.wait_for_workers()
    wait_until(lambda: waiting(site) == [name])
    job = site.client.job(name)
    with pytest.raises(WaitTimeout) as caught:
        job.result(timeout=0.05)
    assert NOBODY in caught.value.message
    shown = command("status", "--redis", site.url)
    assert f"{NOBODY}: its jobs wait" in shown.stderr
    found = json.loads(command("status", "--json", "--redis", site.url).stdout)
    assert [one["funcs"] for one in found["workers"]] == [sorted(OPERATIONS)]
    of_queue = {one["name"]: one for one in found["queues"]}
    assert of_queue[OWN]["model"] == "fake"
    assert of_queue[OWN]["func"] == EMBED
    assert (of_queue[OWN]["queued"], of_queue[OWN]["workers"]) == (1, 0)
    assert of_queue["chat:fake"]["workers"] == 1
    listed = json.loads(command("jobs", "list", "--json", "--redis", site.url).stdout)
    assert (listed["id"], listed["model"], listed["queue"]) == (name, "fake", OWN)
    assert command("jobs", "cancel", name, "--redis", site.url).exit_code == 0
    assert job.status() == "cancelled"


def test_a_foreign_value_in_its_way_stops_nobody_else_and_it_moves_when_that_is_gone(
    site: Site, queue: Queue
) -> None:
    site.redis.set(f"rq:queue:{OWN}", "x")
    job, chat = embed(queue), site.submit()
    site.worker()
    assert chat.result(timeout=PATIENCE).text == text_of(chat.request)
    assert site.redis.hget(job.key, "status") in (b"queued", b"started")
    site.redis.delete(f"rq:queue:{OWN}")
    wait_until(lambda: waiting(site) == [job.id])
