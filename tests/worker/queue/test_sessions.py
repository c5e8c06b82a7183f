"""Sessions: each turn is run with the whole history, and its answer is appended once."""

from __future__ import annotations

import asyncio

import pytest

from jobs import AsyncClient, JobError, SessionBusy, keys
from jobs.store.job_state import Status
from jobs.store.rq_layout import queue_key
from tests.worker.fake_backend import FakeBackend
from tests.worker.queue.session_turns import USER, answer_to, contents, open_session, run
from tests.worker.site import PATIENCE, Site


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
    site.redis.delete(keys.wake("bulk:fake"))
    assert first.cancel()
    assert site.redis.lrange(keys.tenant_queue(queue, "t"), 0, -1) == [second.id.encode()]
    assert site.redis.llen(queue_key(queue)) == 0
    assert site.redis.llen(keys.wake("bulk:fake")) == 1
    site.burst()
    assert second.status() is Status.FINISHED


def test_edit_replaces_the_last_turn(site: Site) -> None:
    session = open_session(site)
    run(site, session, "one", "two")
    backend = run(site, session, "three", edit=True)
    assert [message.text for message in backend.requests[0].messages[::2]] == ["one", "three"]
    assert [message["content"] for message in session.history()[::2]] == ["one", "three"]
    size = int(site.redis.hget(keys.session(session.id), "bytes"))
    assert size == sum(map(len, site.redis.lrange(keys.turns(session.id), 0, -1)))


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
            first = await session.send("one", timeout=PATIENCE)
            assert first.text == answer_to("one")
            text = "".join([chunk.text async for chunk in session.stream("two")])
            assert text == answer_to("two")
            assert (await session.edit("three", timeout=PATIENCE)).text == answer_to("three")
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
