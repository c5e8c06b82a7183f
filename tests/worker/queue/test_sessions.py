"""Sessions: each turn is run with the whole history, and its answer is appended once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from rq import Queue
from rq.job import Job as RQJob
from rq.serializers import JSONSerializer

from jobs import AsyncClient, ChatRequest, JobError, Session, SessionBusy, keys
from jobs.client.dead_letters import purge, requeue
from jobs.client.rq_format import job_key, queue_key
from jobs.client.state import Status
from jobs.client.steps import run_sync
from tests.worker.fake_backend import FakeBackend, text_of
from tests.worker.queue.rq_jobs import QUEUE, fetch
from tests.worker.site import Site, wait_until
from worker.queue.rq_store import RQStore

USER = {"role": "user", "content": "hello"}


def answer_to(content: str, words: int = 5) -> str:
    metadata = {"words": str(words)}
    messages: list[Any] = [{"role": "user", "content": content}]
    return text_of(ChatRequest(model="fake", messages=messages, metadata=metadata))


def open_session(site: Site, name: str | None = None, **fields: Any) -> Session:
    site.client.serving = None
    return site.client.session(name, model="fake", **fields)


def run(site: Site, session: Session, *contents: str, **fields: Any) -> FakeBackend:
    """Run turns one after the other, on one backend per turn; returns the last one."""
    backend = FakeBackend()
    for content in contents:
        session.submit(content, **fields)
        site.burst(backend := FakeBackend())
    return backend


def contents(history: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in history]


def test_a_turn_is_run_with_the_whole_history(site: Site) -> None:
    session = open_session(site, system="Be brief.", temperature=0)
    backend = run(site, session, "one", "two")
    expected = [
        ("system", "Be brief."),
        ("user", "one"),
        ("assistant", answer_to("one")),
        ("user", "two"),
    ]
    (request,) = backend.requests
    assert [(message.role, message.text) for message in request.messages] == expected
    assert request.temperature == 0
    assert contents(session.history()) == [*expected, ("assistant", answer_to("two"))]
    assert [turn.finish_reason for turn in session.turns()] == ["stop", "stop"]


def test_the_row_of_a_turn_has_the_new_messages_and_the_session(site: Site) -> None:
    session = open_session(site, "s-1")
    run(site, session, "one", "two")
    rows = site.rows()
    assert {row["session"] for row in rows} == {"s-1"}
    assert sorted(len(row["messages"]) for row in rows) == [1, 1]


def test_another_client_continues_a_session_by_its_id(site: Site) -> None:
    run(site, open_session(site, "s", temperature=0.5), "one")
    again = site.client.session("s")
    backend = run(site, again, "two")
    assert backend.requests[0].temperature == 0.5
    assert len(again.history()) == 4


def test_a_second_turn_is_refused_while_one_runs(site: Site) -> None:
    session = open_session(site)
    job = session.submit("one")
    with pytest.raises(SessionBusy, match=job.id) as caught:
        session.submit("two")
    assert caught.value.job_id == job.id and caught.value.code == "session_busy"
    for change in (session.reset, session.delete):
        with pytest.raises(SessionBusy, match=job.id):
            change()
    site.burst()
    assert len(session.history()) == 2
    session.submit("two")


def test_turns_that_wait_run_in_their_order(site: Site) -> None:
    session = open_session(site)
    jobs = [session.submit(f"q{number}", wait=True) for number in range(6)]
    assert [job.status() for job in jobs] == [Status.QUEUED] + [Status.DEFERRED] * 5
    backend = site.burst(FakeBackend())
    assert backend.begun == [job.id for job in jobs]
    expected = []
    for number in range(6):
        expected += [("user", f"q{number}"), ("assistant", answer_to(f"q{number}"))]
    assert contents(session.history()) == expected
    assert not site.redis.exists(keys.open_turns(session.id))


def test_a_waiting_turn_can_be_cancelled(site: Site) -> None:
    session = open_session(site)
    first, second, third = (session.submit(name, wait=True) for name in ("a", "b", "c"))
    assert second.cancel()
    site.burst()
    assert [message["content"] for message in session.history()[::2]] == ["a", "c"]
    assert first.status() is Status.FINISHED and third.status() is Status.FINISHED


def test_a_cancelled_first_turn_lets_the_next_one_run(site: Site) -> None:
    session = open_session(site)
    first = session.submit("a")
    second = session.submit("b", wait=True)
    assert first.cancel()
    site.burst()
    assert second.status() is Status.FINISHED
    assert contents(session.history()) == [("user", "b"), ("assistant", answer_to("b"))]


def test_a_turn_that_waited_joins_the_line_of_its_tenant_and_wakes_workers(site: Site) -> None:
    session = open_session(site)
    first, second = (
        session.submit(name, wait=True, job={"priority": "bulk", "tenant": "t"})
        for name in ("a", "b")
    )
    queue = keys.bulk_queue("fake")
    site.redis.delete(keys.wake("fake", bulk=True))
    assert first.cancel()
    assert site.redis.lrange(keys.tenant_queue(queue, "t"), 0, -1) == [second.id.encode()]
    assert site.redis.llen(queue_key(queue)) == 0
    assert site.redis.llen(keys.wake("fake", bulk=True)) == 1
    site.burst()
    assert second.status() is Status.FINISHED


@pytest.mark.parametrize("time", [{"delay": 1}, {"at": "2100-01-01T00:00:00Z"}])
def test_a_turn_with_a_time_is_refused(site: Site, time: dict[str, Any]) -> None:
    session = open_session(site)
    (name,) = time
    with pytest.raises(JobError, match=f"{name} can't be set for a turn of a session") as caught:
        session.submit("a", job=time)
    assert caught.value.code == "invalid_request"
    assert not site.redis.exists(keys.open_turns(session.id))


def test_a_failed_turn_leaves_the_history_and_lets_the_next_one_run(site: Site) -> None:
    session = open_session(site)
    failed = session.submit("a", metadata={"fail": "out_of_memory"})
    session.submit("b", wait=True)
    site.burst()
    assert failed.status() is Status.FAILED
    assert [message["content"] for message in session.history()[::2]] == ["b"]


def test_a_retried_turn_is_appended_once(site: Site) -> None:
    session = open_session(site)
    job = session.submit("a", metadata={"fail": "internal"}, job={"retries": 2})
    later = session.submit("b", wait=True)
    site.burst()
    assert job.status() is Status.FAILED and later.status() is Status.FINISHED
    assert len(session.turns()) == 1


def test_a_stopped_answer_is_kept_as_far_as_it_got(site: Site) -> None:
    session = open_session(site)
    worker = site.worker(delay=0.02)
    stream = session.stream("long", metadata={"words": "5000"})
    seen = "".join(next(stream).text for _ in range(4))
    stream.close()  # type: ignore[attr-defined]
    wait_until(lambda: session.turns())
    (turn,) = session.turns()
    assert turn.finish_reason == "cancelled"
    assert turn.answer["content"].startswith(seen)
    assert answer_to("long", 5000).startswith(turn.answer["content"])
    session.send("next", timeout=30)
    assert len(session.history()) == 4
    assert worker.stop() == 0


def test_an_answer_that_exceeds_its_time_is_kept_as_far_as_it_got(site: Site) -> None:
    session = open_session(site)
    worker = site.worker(delay=0.02)
    session.send("first", timeout=60)  # the worker runs now
    job = session.submit("long", metadata={"words": "100000"}, job={"ttl": 4})
    with pytest.raises(JobError, match="ttl"):
        job.result(timeout=60)
    _, turn = session.turns()
    assert turn.finish_reason == "cancelled" and turn.answer["content"]
    worker.kill()


def test_a_frozen_worker_that_comes_back_appends_nothing(site: Site) -> None:
    session = open_session(site)
    frozen = site.worker(delay=0.02)
    job = session.submit("a", metadata={"words": "60"})
    wait_until(lambda: job.status() is Status.STARTED)
    frozen.freeze()
    other = site.worker()
    wait_until(lambda: job.status() is Status.FINISHED)
    frozen.thaw()
    assert frozen.stop() == 0 and other.stop() == 0
    (turn,) = session.turns()
    assert turn.answer["content"] == answer_to("a", 60)
    (row,) = site.rows()
    assert row["attempt"] == 2


def test_edit_replaces_the_last_turn(site: Site) -> None:
    session = open_session(site)
    run(site, session, "one", "two")
    backend = run(site, session, "three", edit=True)
    assert [message.text for message in backend.requests[0].messages[::2]] == ["one", "three"]
    assert [message["content"] for message in session.history()[::2]] == ["one", "three"]
    size = int(site.redis.hget(keys.session(session.id), "bytes"))
    assert size == sum(map(len, site.redis.lrange(keys.turns(session.id), 0, -1)))


def test_a_requeued_turn_replaces_its_first_answer(site: Site) -> None:
    session = open_session(site)
    worker = site.worker(delay=0.02)
    job = session.submit("long", metadata={"words": "200"})
    next(job.stream())
    job.cancel()
    wait_until(lambda: session.turns())
    worker.kill()
    assert session.turns()[0].finish_reason == "cancelled"
    assert run_sync(requeue(job.id), site.client.connection)
    site.burst()
    (turn,) = session.turns()
    assert turn.finish_reason == "stop" and turn.answer["content"] == answer_to("long", 200)


def test_undo_reset_fork_and_delete(site: Site) -> None:
    session = open_session(site, system="Be brief.")
    run(site, session, "one", "two")
    branch = session.fork()
    assert branch.id != session.id and branch.history() == session.history()
    assert session.undo().messages == [{"role": "user", "content": "two"}]
    assert [message["content"] for message in session.history()][1::2] == ["one"]
    run(site, branch, "three")
    assert len(branch.turns()) == 3 and len(session.turns()) == 1
    session.reset()
    assert contents(session.history()) == [("system", "Be brief.")]
    session.reset(branch.history())
    assert session.history() == branch.history()
    session.delete()
    session.delete()
    with pytest.raises(JobError, match="was deleted") as caught:
        session.submit("one")
    assert caught.value.code == "not_found"
    with pytest.raises(JobError, match="no turn to edit or undo"):
        open_session(site).undo()


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


def test_jobs_of_a_session_that_expires_while_they_wait_fail(site: Site) -> None:
    session = open_session(site)
    jobs = [session.submit(name, wait=True) for name in ("a", "b")]
    for key in (keys.session, keys.turns, keys.open_turns):
        site.redis.delete(key(session.id))
    worker = site.worker()
    wait_until(lambda: all(job.status() is Status.FAILED for job in jobs))
    with pytest.raises(JobError, match="has expired"):
        jobs[1].result(timeout=1)
    assert worker.stop() == 0


def test_a_job_that_was_removed_does_not_hold_its_session(site: Site) -> None:
    session = open_session(site)
    first = session.submit("a")
    second = session.submit("b", wait=True)
    site.redis.delete(job_key(first.id))  # as `rq empty` does
    worker = site.worker()
    wait_until(lambda: second.status() is Status.FINISHED)
    assert worker.stop() == 0
    assert [message["content"] for message in session.history()[::2]] == ["b"]


def test_turns_behind_one_that_rq_cancelled_and_that_was_purged_go_on(site: Site) -> None:
    session = open_session(site)
    jobs = [session.submit(name, wait=True) for name in ("a", "b", "c", "d")]
    for job in (jobs[0], jobs[2]):
        fetch(site, job).cancel()
        assert run_sync(purge(job.id), site.client.connection)
    worker = site.worker()
    wait_until(lambda: jobs[3].status() is Status.FINISHED)
    assert worker.stop() == 0
    assert [message["content"] for message in session.history()[::2]] == ["b", "d"]


def test_a_turn_that_waits_for_its_session_longer_than_its_ttl_fails(site: Site) -> None:
    session = open_session(site)
    session.submit("a")
    late, last = (session.submit(name, wait=True, job={"ttl": 0.05}) for name in ("b", "c"))
    upkeep = RQStore(site.redis, ["fake"], "w1", "rq:worker:w1").upkeep

    def have_failed() -> bool:
        upkeep.step()
        return late.status() is last.status() is Status.FAILED

    wait_until(have_failed)
    with pytest.raises(JobError, match="waited longer than its ttl"):
        late.result(timeout=1)
    site.burst()
    assert [message["content"] for message in session.history()[::2]] == ["a"]


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


def enqueue_by_rq(site: Site, session: str) -> RQJob:
    request = {"model": "fake", "messages": [USER], "job": {"session": session}}
    queue = Queue(QUEUE, connection=site.redis, serializer=JSONSerializer)
    return queue.enqueue(keys.TASK, kwargs={"request": request})


def test_a_job_that_was_enqueued_by_others_joins_its_session(site: Site) -> None:
    session = open_session(site, "s")
    job = enqueue_by_rq(site, "s")
    site.burst()
    assert [turn.job for turn in session.turns()] == [job.id]
    assert not site.redis.exists(keys.open_turns("s"))


def test_a_job_that_was_enqueued_by_others_does_not_interleave(site: Site) -> None:
    session = open_session(site, "s")
    running = session.submit("a")
    site.redis.lpop("rq:queue:chat:fake")  # as if a worker had claimed it
    job = site.client.job(enqueue_by_rq(site, "s").id)
    site.burst()
    with pytest.raises(JobError, match=running.id) as caught:
        job.result(timeout=1)
    assert caught.value.code == "session_busy"
    assert session.turns() == []


def test_fields_of_a_turn_are_checked(site: Site) -> None:
    session = open_session(site)
    with pytest.raises(JobError, match="one answer"):
        site.client.submit(
            {"model": "fake", "messages": [USER], "n": 2, "job": {"session": session.id}}
        )
    with pytest.raises(JobError, match="a session sets it itself"):
        session.submit("a", model="other")
    with pytest.raises(JobError, match="unknown field 'temprature'"):
        open_session(site, temprature=1)
    with pytest.raises(JobError, match=r"job\.turn needs job\.session"):
        site.client.submit({"model": "fake", "messages": [USER], "job": {"turn": {"wait": True}}})
    image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
    with pytest.raises(JobError, match="image"):
        session.submit({"role": "user", "content": image})


def test_tool_calls_and_their_results_are_turns(site: Site) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    session = open_session(site)
    session.reset([USER, asked])
    backend = FakeBackend()
    session.submit({"role": "tool", "tool_call_id": "c1", "content": "3"})
    site.burst(backend)
    roles = [message.role for message in backend.requests[0].messages]
    assert roles == ["user", "assistant", "tool"]
    assert backend.requests[0].messages[1].tool_calls is not None
    assert session.history()[1]["tool_calls"] == [call]


def test_sessions_with_asyncio(site: Site) -> None:
    async def converse() -> None:
        async with AsyncClient(site.url) as client:
            client._producer.serving = None
            session = await client.session(model="fake", system="Be brief.")
            first = await session.send("one", timeout=30)
            assert first.text == answer_to("one")
            text = "".join([chunk.text async for chunk in session.stream("two")])
            assert text == answer_to("two")
            assert (await session.edit("three", timeout=30)).text == answer_to("three")
            branch = await session.fork()
            assert (await session.undo()).messages[0]["content"] == "three"
            assert len(await branch.history()) == 5 and len(await session.turns()) == 1
            job = await session.submit("four", metadata={"words": "10000"})
            with pytest.raises(SessionBusy, match=job.id):
                await session.send("five")
            await job.cancel()
            await branch.reset(system="New.")
            assert await branch.history() == [{"role": "system", "content": "New."}]
            await branch.delete()
            with pytest.raises(JobError, match="no session"):
                await branch.ttl()

    worker = site.worker(delay=0.005)
    asyncio.run(converse())
    worker.kill()
