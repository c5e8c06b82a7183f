"""RQ's format: the same keys as RQ's own classes, and foreign data never breaks a reader."""

from __future__ import annotations

import json
import tracemalloc
import zlib
from datetime import UTC, datetime
from typing import Any, get_args

import pytest
from rq.executions import Execution, ExecutionRegistry
from rq.job import Job as RQJob
from rq.job import JobStatus
from rq.registry import FailedJobRegistry, StartedJobRegistry
from rq.results import Result
from rq.serializers import JSONSerializer

from jobs import Client, JobError, keys
from jobs.api.params import RequestFields
from jobs.store import rq_layout
from jobs.store.job_state import Status

REQUEST: RequestFields = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}


def test_keys_are_those_of_rq(client: Client) -> None:
    started = StartedJobRegistry("chat:demo", connection=client.redis)
    failed = FailedJobRegistry("chat:demo", connection=client.redis)
    execution = Execution("e1", "j1", connection=client.redis)
    assert rq_layout.wip_key("chat:demo") == started.key
    assert rq_layout.registry_key("chat:demo", "failed") == failed.key
    assert rq_layout.results_key("j1") == Result.get_key("j1")  # type: ignore[no-untyped-call]
    assert rq_layout.execution_key("j1", "e1") == execution.key
    assert rq_layout.executions_key("j1") == ExecutionRegistry("j1", client.redis).key


def test_the_queues_of_rq_are_listed_by_name(client: Client) -> None:
    client.submit(REQUEST)
    client.submit({**REQUEST, "job": {"priority": "bulk"}})
    assert rq_layout.queue_names(client.redis) == ["bulk:demo", "chat:demo"]


def test_a_call_that_rq_wrote_is_decoded(client: Client) -> None:
    job = RQJob.create(
        "m.f", args=(1,), kwargs={"a": 2}, connection=client.redis, serializer=JSONSerializer
    )
    size = len(job.data)
    assert rq_layout.decode_call(job.to_dict()["data"]) == ("m.f", [1], {"a": 2}, size)
    assert rq_layout.decode_call(job.data) == ("m.f", [1], {"a": 2}, size)


DEEP: list[Any] = []
for _ in range(200):
    DEEP = [DEEP]
FOREIGN = {
    "empty": b"",
    "pickle": b"\x80\x04K\x01.",
    "not UTF-8": zlib.compress(b"\xff\xff"),
    "not four elements": b"[1, 2]",
    "a method": json.dumps(["f", "instance", [], {}]).encode(),
    "args not a list": json.dumps(["f", None, {}, {}]).encode(),
    "kwargs not an object": json.dumps(["f", None, [], []]).encode(),
    "too deep": json.dumps(["f", None, [DEEP], {}]).encode(),
    "too deep for the parser": b"[" * 10**6,
}


@pytest.mark.parametrize("data", FOREIGN.values(), ids=FOREIGN.keys())
def test_foreign_data_is_refused_and_does_not_break_a_reader(client: Client, data: bytes) -> None:
    assert_refused(client, data)


def test_data_that_is_too_large_when_unpacked_is_refused(client: Client) -> None:
    assert_refused(client, zlib.compress(b'["f", null, [], {}]' + b" " * rq_layout.MAX_DATA, 1))


def assert_refused(client: Client, data: bytes) -> None:
    with pytest.raises(ValueError):
        rq_layout.decode_call(data)
    fields: Any = {"data": data, "status": b"queued", "created_at": b"\xff", "origin": b"\xff"}
    client.redis.hset(rq_layout.job_key("foreign"), mapping=fields)
    assert client.job("foreign").status() is Status.QUEUED
    with pytest.raises(Exception, match="no job 'foreign'"):
        _ = client.job("foreign").request
    assert client.job("foreign").cancel()


def test_a_time_is_read_back_and_anything_else_is_none() -> None:
    moment = datetime(2024, 5, 6, 7, 8, 9, 123456, UTC)
    assert rq_layout.parse_time(rq_layout.format_time(moment).encode()) == moment.timestamp()
    for value in (None, b"", b"\xff", b"yesterday", b"2024-13-01T00:00:00Z"):
        assert rq_layout.parse_time(value) is None


def test_a_result_is_read_back() -> None:
    pairs = rq_layout.result_fields("j1", "finished", answer='{"a":1}')
    fields = {
        str(name).encode(): str(value).encode()
        for name, value in zip(pairs[::2], pairs[1::2], strict=True)
    }
    assert rq_layout.read_result("j1", b"1-0", fields) == ({"a": 1}, None)
    assert rq_layout.read_peak(fields) is None  # as of an older worker


@pytest.mark.parametrize(
    ("value", "peak"), [("12", 12), ("", None), ("x", None), ("-1", None), ("9" * 20, None)]
)
def test_a_peak_of_memory_is_read_back_and_anything_else_is_none(
    value: str, peak: int | None
) -> None:
    assert rq_layout.read_peak({rq_layout.PEAK.encode(): value.encode()}) == peak


@pytest.mark.parametrize("status", JobStatus, ids=str)
def test_each_status_of_rq_is_known_to_clients(status: JobStatus) -> None:
    assert Status(rq_layout.read_status(status.value.encode())) is not Status.UNKNOWN


def test_a_status_that_rq_does_not_have_is_unknown() -> None:
    assert rq_layout.read_status(None) == rq_layout.read_status(b"lost") == "unknown"


def test_every_status_name_is_a_status() -> None:
    assert set(get_args(rq_layout.StatusName)) == set(Status)


def test_a_job_abandoned_by_rq_has_lost_its_worker(client: Client) -> None:
    job = client.submit(REQUEST)
    rq_job = RQJob.fetch(job.id, connection=client.redis, serializer=JSONSerializer)
    failure = rq_layout.result_fields(job.id, "failed", error="rq.exceptions.AbandonedJobError: x")
    client.redis.xadd(
        rq_layout.results_key(job.id), dict(zip(failure[::2], failure[1::2], strict=True))
    )
    rq_job.set_status(JobStatus.FAILED)
    with pytest.raises(JobError, match="AbandonedJobError") as caught:
        job.result(timeout=1)
    assert caught.value.code == "worker_lost"


IN_A_RUN: Any = {"model": "demo", "messages": [], "job": {"run": "sums", "row": 4}}


@pytest.mark.parametrize(
    "call",
    [
        ["f", "instance", [], {"request": IN_A_RUN}],
        ["f", None, {}, {"request": IN_A_RUN}],
        ["f", None, [DEEP], {"request": IN_A_RUN}],
    ],
)
def test_a_cancelled_job_keeps_its_run_where_a_worker_would_refuse_it(
    client: Client, call: list[Any]
) -> None:
    data = json.dumps(call).encode()
    with pytest.raises(ValueError):
        rq_layout.decode_call(data)
    fields: Any = {"data": data, "status": b"queued", "origin": b"chat:demo"}
    client.redis.hset(rq_layout.job_key("foreign"), mapping=fields)
    client.redis.rpush(rq_layout.queue_key("chat:demo"), "foreign")
    assert client.job("foreign").cancel()
    entries: Any = client.redis.xrange(keys.outbox("sums"))
    ((_, content),) = entries
    row = json.loads(content[b"row"])
    assert (row["run"], row["row_index"], row["request"]) == ("sums", 4, IN_A_RUN)


def test_the_request_of_a_job_that_is_not_run_is_unpacked_within_the_limit() -> None:
    text = f'["f",null,[],{{"request":{{"a":"{"x" * 4 * rq_layout.MAX_DATA}"}}}}]'
    bomb = zlib.compress(text.encode(), 1)
    del text
    tracemalloc.start()
    try:
        assert rq_layout.submitted_call(bomb) == (None, {})
        assert tracemalloc.get_traced_memory()[1] < 3 * rq_layout.MAX_DATA
    finally:
        tracemalloc.stop()
