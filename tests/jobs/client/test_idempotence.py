"""An id or a row belongs to one request: sent again, it gives the same job; another is refused."""

from __future__ import annotations

import pytest

from jobs import Client, JobError, keys
from jobs.api.params import JobFields, RequestFields
from jobs.store.expiry import ROW_SECONDS
from jobs.store.rq_layout import job_key
from tests.jobs.conftest import StepwiseWorker

REQUEST: RequestFields = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
OTHER: RequestFields = {**REQUEST, "messages": [{"role": "user", "content": "other"}]}
ROW: JobFields = {"run": "r", "row": 7}


def queued(client: Client) -> int:
    return int(client.redis.llen("rq:queue:chat:demo"))


def test_the_same_request_with_the_same_id_is_the_same_job(client: Client) -> None:
    mine: RequestFields = {**REQUEST, "job": {"id": "mine"}}
    assert client.submit(mine).id == client.submit(mine).id == "mine"
    assert [job.id for job in client.submit_many([mine, mine])] == ["mine", "mine"]
    assert queued(client) == 1


def test_a_taken_id_is_refused_and_nothing_is_overwritten(client: Client) -> None:
    client.submit({**REQUEST, "job": {"id": "mine"}})
    with pytest.raises(JobError, match=r"'mine' is taken") as caught:
        client.submit({**OTHER, "job": {"id": "mine"}})
    assert caught.value.param == "job.id"
    assert client.job("mine").request.messages[0].text == "hi"


def test_a_refused_id_of_many_does_not_affect_the_others(client: Client) -> None:
    client.submit({**REQUEST, "job": {"id": "mine"}})
    with pytest.raises(JobError) as caught:
        client.submit_many([REQUEST, {**OTHER, "job": {"id": "mine"}}, REQUEST])
    assert caught.value.message.startswith("request 1: job.id: 'mine' is taken by another job")
    assert caught.value.message.endswith("2 of 3 requests are enqueued")
    assert caught.value.param == "job.id"
    assert queued(client) == 3


def test_the_same_request_with_the_same_row_is_the_same_job(client: Client) -> None:
    first = client.submit({**REQUEST, "job": ROW})
    assert client.submit({**REQUEST, "job": ROW}).id == first.id
    assert queued(client) == 1
    assert client.submit({**REQUEST, "job": {**ROW, "row": 8}}).id != first.id
    assert client.submit({**REQUEST, "job": {**ROW, "run": "s"}}).id != first.id


def test_a_taken_row_is_refused(client: Client) -> None:
    client.submit({**REQUEST, "job": ROW})
    others: list[RequestFields] = [
        {**OTHER, "job": ROW},
        {**REQUEST, "job": {**ROW, "id": "mine"}},
    ]
    for other in others:
        with pytest.raises(
            JobError, match="row 7 of run 'r' is taken by another request"
        ) as caught:
            client.submit(other)
        assert (caught.value.code, caught.value.param) == ("invalid_request", "job.row")
    assert queued(client) == 1


def test_a_row_stays_reserved_after_its_job_has_gone(
    client: Client, worker: StepwiseWorker
) -> None:
    job = client.submit({**REQUEST, "job": ROW})
    worker.start(job.id)
    worker.finish(job.id, "done")
    client.redis.delete(job_key(job.id))  # as when its result has expired
    assert client.submit({**REQUEST, "job": ROW}).id == job.id
    with pytest.raises(JobError, match="row 7"):
        client.submit({**OTHER, "job": ROW})
    assert queued(client) == 0


def test_reservations_are_small_and_expire_with_the_run(client: Client) -> None:
    count = 2000
    client.submit_many({**REQUEST, "job": {"run": "r", "row": row}} for row in range(count))
    names = list(client.redis.scan_iter("chatjobs:rows:*"))
    sizes = [client.redis.memory_usage(name, samples=0) for name in names]
    assert sum(size or 0 for size in sizes) / count <= 32  # bytes per row, as docs/limits.md says
    assert all(0 < int(client.redis.ttl(name)) <= ROW_SECONDS for name in names)
    client.submit({**REQUEST, "job": {"run": "sparse", "row": 2**40}})
    (size,) = [client.redis.memory_usage(name) for name in client.redis.scan_iter("*:sparse:*")]
    assert (size or 0) <= 256


def test_a_refused_request_reserves_nothing(client: Client) -> None:
    client.redis.hset(keys.LIMITS, "jobs", 0)
    with pytest.raises(JobError, match="is full"):
        client.submit({**REQUEST, "job": ROW})
    client.redis.delete(keys.LIMITS)
    client.submit({**OTHER, "job": ROW})
