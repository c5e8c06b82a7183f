"""Refusals of sessions, each with a typed error."""

from __future__ import annotations

from typing import Any

import pytest

from jobs import ChatRequest, JobError, keys
from jobs.store.job_state import Status
from tests.worker.queue.session_turns import USER, open_session, run
from tests.worker.site import Site


@pytest.mark.parametrize("time", [{"delay": 1}, {"at": "2100-01-01T00:00:00Z"}])
def test_a_turn_with_a_time_is_refused(site: Site, time: Any) -> None:
    session = open_session(site)
    (name,) = time
    with pytest.raises(JobError, match=f"{name} can't be set for a turn of a session") as caught:
        session.submit("a", job=time)
    assert caught.value.code == "invalid_request"
    assert not site.redis.exists(keys.open_turns(session.id))


def test_an_expired_session_is_refused(site: Site) -> None:
    session = open_session(site, ttl=100)
    assert 90 < session.ttl() <= 100
    job = session.submit("one")
    assert session.ttl() > 100  # it is kept while it runs
    site.burst()
    assert 90 < session.ttl() <= 100
    assert job.status() is Status.FINISHED
    site.redis.delete(keys.session(session.id), keys.turns(session.id))
    for call in (lambda: session.send("two"), session.history, session.ttl):
        with pytest.raises(JobError, match="has expired") as caught:
            call()
        assert caught.value.code == "not_found"


def test_a_session_of_another_model_is_refused(site: Site) -> None:
    open_session(site, "s")
    with pytest.raises(JobError, match="belongs to model 'fake', not to 'other'") as caught:
        site.client.session("s", model="other")
    assert caught.value.param == "model"
    request = ChatRequest(model="other", messages=[USER], job={"session": "s"})
    with pytest.raises(JobError, match="belongs to model 'fake', not to 'other'"):
        site.client.submit(request)
    with pytest.raises(JobError, match="another system message"):
        site.client.session("s", system="No.")


def test_an_unknown_session_is_refused(site: Site) -> None:
    with pytest.raises(JobError, match="no session 'nope'"):
        site.client.session("nope")
    with pytest.raises(JobError, match="no session 'nope'"):
        site.client.submit({"model": "fake", "messages": [USER], "job": {"session": "nope"}})
    with pytest.raises(JobError, match="model is required"):
        site.client.session()
    assert not list(site.redis.scan_iter("rq:*"))


def test_a_session_that_is_full_is_refused_with_the_numbers(site: Site) -> None:
    site.redis.hset(keys.LIMITS, "session_bytes", 2_000_000)
    session = open_session(site)
    run(site, session, "x" * 2_100_000)
    with pytest.raises(JobError, match=r"has 2\.1 MB of turns, and the limit .* is 2\.0 MB"):
        session.submit("more")
    session.undo()
    session.submit("more")


def test_a_session_holds_at_most_100_jobs(site: Site) -> None:
    session = open_session(site)
    for number in range(100):
        session.submit(str(number), wait=True)
    with pytest.raises(JobError, match="has 100 jobs that have not ended, and the limit is 100"):
        session.submit("more", wait=True)


def test_fields_of_a_turn_are_checked(site: Site) -> None:
    session = open_session(site)
    with pytest.raises(JobError, match="one answer"):
        site.client.submit(
            {"model": "fake", "messages": [USER], "n": 2, "job": {"session": session.id}}
        )
    with pytest.raises(JobError, match="a session sets it itself"):
        session.submit("a", model="other")  # type: ignore[call-arg]
    with pytest.raises(JobError, match="unknown field 'temprature'"):
        open_session(site, temprature=1)
    with pytest.raises(JobError, match=r"job\.turn needs job\.session"):
        site.client.submit({"model": "fake", "messages": [USER], "job": {"turn": {"wait": True}}})
    image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
    with pytest.raises(JobError, match="image"):
        session.submit({"role": "user", "content": image})
