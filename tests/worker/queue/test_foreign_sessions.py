"""Foreign values in the keys of a session fail its turns and no other job."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from jobs import JobError, Session, keys
from jobs.operations import Operation
from jobs.store.job_state import Status
from jobs.store.job_store import JobStore
from jobs.store.rq_layout import job_key
from tests.worker.fake_backend import FakeBackend, FakeHandle
from tests.worker.queue.session_turns import contents, open_session, run
from tests.worker.site import PATIENCE, Site, wait_until
from worker.backend import Sink

TTLS = ("1e30", "nan", "inf", "abc", "", "0", "-5", "1.5", "99999999999999999999", b"\xff")


def write(site: Site, session: Session, field: str, value: Any) -> None:
    site.redis.hset(keys.session(session.id), field, value)


def expect_sentence(caught: pytest.ExceptionInfo[JobError], session: Session, field: str) -> None:
    assert caught.value.code == "internal"
    message = caught.value.message
    assert message.startswith(f"session {session.id!r} can't be read: the field {field} of ")
    assert "another program" in message and len(message) < 400


class _Writes(FakeBackend):
    """Writes a field of the session's hash, or its turns, when a job begins."""

    def __init__(
        self, site: Site, session: Session, field: str | None, value: str, job: str
    ) -> None:
        super().__init__()
        self._write = (site, session, field, value, job)

    def submit(self, operation: Operation, request: Any, sink: Sink) -> FakeHandle:
        site, session, field, value, job = self._write
        if request.job.id == job and field is not None:
            write(site, session, field, value)
        elif request.job.id == job:
            site.redis.set(keys.turns(session.id), value)
        return super().submit(operation, request, sink)


@pytest.mark.parametrize("ttl", TTLS)
def test_a_foreign_ttl_fails_the_turns_of_its_session_alone(site: Site, ttl: str | bytes) -> None:
    bad, good = open_session(site, "bad"), open_session(site, "good")
    first, second = (bad.submit(name, wait=True) for name in ("a", "b"))
    write(site, bad, "ttl", ttl)
    others = [site.submit("hello"), good.submit("hi"), site.submit("again")]
    site.burst()
    assert [job.status() for job in others] == [Status.FINISHED] * 3
    for job in (first, second):
        with pytest.raises(JobError) as caught:
            job.result(timeout=1)
        expect_sentence(caught, bad, "ttl")
    assert bad.turns() == [] and not site.redis.exists(keys.open_turns("bad"))


def test_an_unforeseen_error_of_one_session_stops_no_other_job(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "return redis.error_reply('ERR value is not an integer or out of range')"
    monkeypatch.setattr("jobs.store.claim.BEGIN", text)
    store = JobStore(site.redis, ["fake"], "w1", "rq:worker:w1")
    turn, other = open_session(site).submit("a"), site.submit("hello")
    claimed = {job.lease.job: job for job in store.claim(lambda model, bulk: 10).jobs}
    assert claimed[turn.id].fault is not None and claimed[other.id].fault is None


def test_many_turns_of_a_foreign_session_make_no_worker_sick(site: Site) -> None:
    bad = open_session(site, "bad")
    turns = [bad.submit(str(number), wait=True) for number in range(8)]
    write(site, bad, "ttl", "1e30")
    worker = site.worker()
    wait_until(lambda: all(job.status() is Status.FAILED for job in turns))
    assert site.submit("hello").result(timeout=PATIENCE).text
    assert worker.stop() == 0 and "in a row" not in worker.output


def test_a_foreign_ttl_while_a_turn_runs_keeps_its_answer(site: Site) -> None:
    session = open_session(site)
    site.burst(_Writes(site, session, "ttl", "1e30", session.submit("a").id))
    assert [turn.messages[0]["content"] for turn in session.turns()] == ["a"]
    assert site.redis.ttl(keys.turns(session.id)) > 0
    with pytest.raises(JobError) as caught:
        session.submit("b")
    expect_sentence(caught, session, "ttl")


@pytest.mark.parametrize("size", ["abc", "1.5", "1e5", "inf", "nan", "-9", "9" * 20, ""])
def test_a_foreign_size_while_a_turn_runs_delays_no_later_turn(site: Site, size: str) -> None:
    session = open_session(site)
    jobs = [session.submit(name, wait=True) for name in ("a", "b")]
    site.burst(_Writes(site, session, "bytes", size, jobs[0].id))
    assert [job.status() for job in jobs] == [Status.FINISHED] * 2
    found = site.redis.lrange(keys.turns(session.id), 0, -1)
    assert len(found) == 2
    assert int(site.redis.hget(keys.session(session.id), "bytes")) == sum(map(len, found))


def test_turns_of_another_type_delay_no_later_turn(site: Site) -> None:
    session = open_session(site)
    jobs = [session.submit(name, wait=True) for name in ("a", "b")]
    site.burst(_Writes(site, session, None, "x", jobs[0].id))
    with pytest.raises(JobError, match=r"can't be read: .*RENAME 'chatjobs:\{") as caught:
        jobs[1].result(timeout=1)
    assert caught.value.code == "internal"


class _Overwrites(FakeBackend):
    """Overwrites a key of another type when a job begins."""

    def __init__(self, site: Site, key: str, job: str) -> None:
        super().__init__()
        self._site, self._key, self._job = site, key, job

    def submit(self, operation: Operation, request: Any, sink: Sink) -> FakeHandle:
        if request.job.id == self._job:
            self._site.redis.rename(self._key, "aside")
            self._site.redis.set(self._key, "x")
        return super().submit(operation, request, sink)


@pytest.mark.parametrize("key_of", [keys.session, keys.turns, keys.open_turns])
def test_a_turn_that_its_session_can_not_take_fails_with_the_key_and_the_next_one_goes_on(
    site: Site, store: JobStore, caplog: pytest.LogCaptureFixture, key_of: Callable[[str], str]
) -> None:
    session, key = open_session(site, "s"), key_of("s")
    run(site, session, "before")
    first, second = (session.submit(name, wait=True) for name in ("a", "b"))
    site.burst(_Overwrites(site, key, first.id))
    with pytest.raises(JobError, match=f"RENAME '{re.escape(key)}'") as caught:
        first.result(timeout=1)
    assert caught.value.message.startswith("the answer can't be kept: ")
    caplog.clear()
    for _ in range(2):
        store.maintenance.step()
    waits = second.status() is Status.DEFERRED
    assert waits == (key_of is keys.open_turns)
    named = [one for one in caplog.records if f"RENAME '{key}'" in one.getMessage()]
    assert len(named) == int(waits)
    site.redis.delete(key)
    site.redis.rename("aside", key)
    store.maintenance.step()
    site.burst()
    assert second.status().over
    run(site, session, "after")
    said = [content for _, content in contents(session.history())[::2]]
    assert said == ["before", *(["b"] if waits else []), "after"]


@pytest.mark.parametrize(
    ("field", "value"), [("model", b"\xff"), ("model", ""), ("system", b"\xff\xfe")]
)
def test_foreign_text_fails_the_turns_of_its_session(site: Site, field: str, value: Any) -> None:
    bad, good = open_session(site, "bad"), open_session(site, "good")
    jobs = bad.submit("a"), good.submit("b")
    write(site, bad, field, value)
    site.burst()
    assert jobs[1].status() is Status.FINISHED
    with pytest.raises(JobError) as caught:
        jobs[0].result(timeout=1)
    expect_sentence(caught, bad, field)
    site.redis.hdel(keys.session("bad"), "system")
    write(site, bad, "model", "fake")
    run(site, bad, "again")
    assert [content for _, content in contents(bad.history())[::2]] == ["again"]


def test_a_job_of_another_type_does_not_hold_its_session(site: Site) -> None:
    session = open_session(site)
    first, second = (session.submit(name, wait=True) for name in ("a", "b"))
    site.redis.delete(job_key(first.id))
    site.redis.set(job_key(first.id), "x")
    worker = site.worker()
    wait_until(lambda: second.status() is Status.FINISHED)
    assert worker.stop() == 0
