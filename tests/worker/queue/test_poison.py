"""Malformed and hostile jobs fail alone; nothing in them is executed or unpickled."""

from __future__ import annotations

import json
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest
from rq import Queue
from rq.serializers import JSONSerializer

from jobs import JobError
from jobs.client.job import Job
from jobs.operations import CHAT, Operation
from jobs.store.settlement import Settlement
from tests.worker.fake_backend import FakeBackend, text_of
from tests.worker.panics import panic
from tests.worker.site import Site
from worker.backend import Outcome
from worker.queue.attempt import Attempt, SettlementBuilder

MESSAGES = [{"role": "user", "content": "hi"}]
GOOD = {"model": "fake", "messages": MESSAGES}


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


def call(request: Any, func: str = CHAT.func, args: Any = (), **more: Any) -> bytes:
    return json.dumps([func, None, list(args), {"request": request, **more}]).encode()


def put(site: Site, data: bytes | None = None, **fields: Any) -> Job:
    """Queue a job hash as another producer might write it."""
    name = f"foreign-{site.redis.llen('rq:queue:chat:fake')}"
    mapping: dict[Any, Any] = {"status": "queued", "origin": "chat:fake", **fields}
    if data is not None:
        mapping["data"] = data
    site.redis.hset(f"rq:job:{name}", mapping=mapping)
    site.redis.rpush("rq:queue:chat:fake", name)
    return site.client.job(name)


def nested(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels):
        value = [value]
    return value


@pytest.fixture
def bomb(tmp_path: Path) -> bytes:
    return pickle.dumps(("os.getcwd", None, (), {"request": Bomb(tmp_path / "exploded")}))


def test_pickle_is_refused_and_never_loaded(site: Site, bomb: bytes, tmp_path: Path) -> None:
    jobs = [put(site, bomb), put(site, zlib.compress(bomb))]
    site.burst()
    for job in jobs:
        with pytest.raises(JobError, match="serializer json") as failure:
            job.result(timeout=1)
        assert failure.value.code == "invalid_request"
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    ("data", "code", "message"),
    [
        (b"{", "invalid_request", "JSON"),
        (b"\xff\xfe", "invalid_request", "JSON"),
        (None, "invalid_request", "JSON"),
        (b"[]", "invalid_request", "list of four"),
        (b"[1, 2, 3, 4]", "invalid_request", "plain function"),
        (call(GOOD, func="os.system"), "invalid_request", "'os.system'"),
        (call(GOOD, func="os.worker.tasks.score"), "invalid_request", "worker.tasks.score'"),
        (call(GOOD, func="worker.tasks.Score"), "invalid_request", "'worker.tasks.Score'"),
        (call(GOOD, func="worker.tasks.a.b"), "invalid_request", "'worker.tasks.a.b'"),
        (call(GOOD, func="worker.tasks.score\n"), "invalid_request", "runs only"),
        (call(GOOD, func=None), "invalid_request", "None"),  # type: ignore[arg-type]
        (call(GOOD, args=[1]), "invalid_request", "one keyword argument"),
        (call(GOOD, timeout=3), "invalid_request", "one keyword argument"),
        (call("hi"), "invalid_request", "JSON object"),
        (call([]), "invalid_request", "JSON object"),
        (call({**GOOD, "temprature": 1}), "invalid_request", "temprature"),
        (call({**GOOD, "n": 10**9}), "invalid_request", "n"),
        (call({**GOOD, "model": "other"}), "model_not_found", "it serves: fake"),
        (call({**GOOD, "model": "\ud800"}), "invalid_request", "model"),
        (call({**GOOD, "tool_choice": {"a": nested(150)}}), "invalid_request", "nested"),
        (b"[" * 100_000 + b"]" * 100_000, "invalid_request", "nested"),
    ],
)
def test_a_bad_call_fails_alone(site: Site, data: bytes | None, code: str, message: str) -> None:
    assert_fails_alone(site, data, code, message)


def test_a_call_that_is_too_large_when_unpacked_fails_alone(site: Site) -> None:
    data = zlib.compress(b" " * (65 * 2**20), 1)
    assert_fails_alone(site, data, "invalid_request", "larger than")


def assert_fails_alone(site: Site, data: bytes | None, code: str, message: str) -> None:
    before, bad, after = site.submit(), put(site, data), site.submit()
    site.burst()
    with pytest.raises(JobError, match=message) as failure:
        bad.result(timeout=1)
    assert failure.value.code == code
    assert before.result(timeout=1).text == after.result(timeout=1).text == text_of(before.request)
    row = site.row(bad)
    assert (row["status"], row["error_type"]) == ("error", code)


@pytest.mark.parametrize(
    "fields",
    [
        {"timeout": "soon"},
        {"result_ttl": "for ever", "failure_ttl": b"\xff", "enqueued_at": "yesterday"},
        {"result_ttl": 10**30, "enqueued_at": b"\xff", "created_at": "9999-99-99"},
        {"chatjobs_attempt": "none", "chatjobs_retried": "x", "chatjobs_lost": "x"},
        {"chatjobs_attempt": "1.5"},
        {"chatjobs_attempt": "9" * 30},
        {"chatjobs_attempt": "-3"},
        {"meta": b"\x80", "status": "perhaps", "worker_name": b"\xff", "last_heartbeat": ""},
    ],
)
def test_malformed_fields_of_a_valid_job_are_ignored(site: Site, fields: dict[str, Any]) -> None:
    odd, after = put(site, call(GOOD), **fields), site.submit()
    site.burst()
    assert odd.status().value == after.status().value == "finished"
    assert site.row(odd)["status"] == "ok"


def test_lone_surrogates_get_a_row_as_any_other_text(site: Site) -> None:
    text = "half a pair: \ud83d"
    job = put(site, call({**GOOD, "messages": [{"role": "user", "content": text}]}))
    fine = put(site, call({**GOOD, "messages": [{"role": "user", "content": "nul: \x00"}]}))
    site.burst()
    assert site.row(job)["error_type"] == "invalid_request"
    assert site.row(fine)["status"] == "ok"


def test_ids_without_a_job_hash_are_dropped(site: Site) -> None:
    site.redis.set("rq:job:a-string", "x")
    site.redis.hset(b"rq:job:\xff\xfe", "data", "x")
    site.redis.rpush("rq:queue:chat:fake", "no-such-job", "a-string", b"\xff\xfe", "")
    job = site.submit()
    site.burst()
    assert job.status().value == "finished"


def test_an_id_of_another_form_is_served(site: Site) -> None:
    site.redis.hset("rq:job:some:id.of.theirs", mapping={"data": call(GOOD)})
    site.redis.rpush("rq:queue:chat:fake", "some:id.of.theirs")
    site.burst()
    assert site.redis.hget("rq:job:some:id.of.theirs", "status") == b"finished"


def test_a_job_pickled_by_rq_fails_with_a_hint(site: Site) -> None:
    queue = Queue("chat:fake", connection=site.redis)
    job = queue.enqueue(CHAT.func, request=GOOD)
    site.burst()
    with pytest.raises(JobError, match="serializer json"):
        site.client.job(job.id).result(timeout=1)


def test_a_job_enqueued_with_rq_is_served(site: Site) -> None:
    queue = Queue("chat:fake", connection=site.redis, serializer=JSONSerializer)
    job = queue.enqueue(CHAT.func, request=GOOD)
    site.burst()
    answer: Any = job.return_value(refresh=True)
    assert answer["object"] == "chat.completion"


def test_a_panic_in_submit_fails_only_its_job(site: Site) -> None:
    bad = site.submit(panic=1, retries=0)
    good = site.submit_many(["a", "b"])
    site.burst()
    with pytest.raises(JobError, match="PanicException") as caught:
        bad.result(timeout=1)
    assert caught.value.code == "internal"
    assert [job.result(timeout=1).text for job in good] == [text_of(job.request) for job in good]
    site.assert_settled([bad, *good])


def test_a_panic_at_settlement_fails_only_its_job(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = site.submit("bad"), site.submit("good")
    whole = SettlementBuilder.for_attempt

    def for_attempt(self: SettlementBuilder, attempt: Attempt, row_bytes: int) -> Settlement:
        if attempt.lease.job == bad.id:
            panic()
        return whole(self, attempt, row_bytes)

    monkeypatch.setattr(SettlementBuilder, "for_attempt", for_attempt)
    site.burst()
    with pytest.raises(JobError, match="PanicException"):
        bad.result(timeout=1)
    assert good.result(timeout=1).text == text_of(good.request)
    site.assert_settled([bad, good])


def test_an_outcome_that_cannot_be_encoded_fails_only_its_job(site: Site) -> None:
    class Odd(FakeBackend):
        def submit(self, operation: Operation, request: Any, sink: Any) -> Any:
            if request.messages[0].text == "odd":
                sink.ended(Outcome(result=3))  # type: ignore[arg-type]
                return None
            return super().submit(operation, request, sink)

    odd, good = site.submit_many(["odd", "good"], words=1)
    site.burst(Odd())
    with pytest.raises(JobError, match="AttributeError"):
        odd.result(timeout=1)
    assert good.status().value == "finished"
