"""Turns of sessions whose job fails, is stopped, comes back, waits too long or is not ours."""

from __future__ import annotations

import pytest
from rq import Queue
from rq.job import Job as RQJob
from rq.serializers import JSONSerializer

from jobs import JobError, Session, keys
from jobs.client.job import Job
from jobs.operations import CHAT
from jobs.store.connection.protocol import run_sync
from jobs.store.job_state import Status
from jobs.store.job_store import JobStore
from jobs.store.purge import purge
from jobs.store.requeue import requeue
from jobs.store.rq_layout import job_key
from tests.worker.queue.rq_jobs import QUEUE, fetch
from tests.worker.queue.session_turns import USER, answer_to, open_session, run
from tests.worker.site import PATIENCE, Site, wait_until


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
    session.send("next", timeout=PATIENCE)
    assert len(session.history()) == 4
    assert worker.stop() == 0


def test_a_stream_that_is_never_begun_runs_no_job(site: Site) -> None:
    session = open_session(site)
    session.stream("a")
    session.submit("b")
    site.burst()
    assert [turn.messages[0]["content"] for turn in session.turns()] == ["b"]


def test_an_answer_that_exceeds_its_time_is_kept_as_far_as_it_got(site: Site) -> None:
    session = open_session(site)
    worker = site.worker(delay=0.02)
    session.send("first", timeout=PATIENCE)  # the worker runs now
    job = session.submit("long", metadata={"words": "100000"}, job={"ttl": 4})
    with pytest.raises(JobError, match="ttl"):
        job.result(timeout=PATIENCE)
    _, turn = session.turns()
    assert turn.finish_reason == "cancelled" and turn.answer["content"]
    worker.kill()


def test_a_frozen_worker_that_comes_back_appends_nothing(site: Site) -> None:
    session = open_session(site)
    frozen = site.worker(delay=0.02)
    job = session.submit("a", metadata={"words": "400"})
    wait_until(lambda: job.status() is Status.STARTED)
    frozen.freeze()
    other = site.worker()
    wait_until(lambda: job.status() is Status.FINISHED)
    frozen.thaw()
    assert frozen.stop() == 0 and other.stop() == 0
    (turn,) = session.turns()
    assert turn.answer["content"] == answer_to("a", 400)
    (row,) = site.rows()
    assert row["attempt"] == 2


def test_a_requeued_turn_replaces_its_first_answer(site: Site) -> None:
    session = open_session(site)
    worker = site.worker(delay=0.02)
    job = session.submit("long", metadata={"words": "600"})
    next(job.stream())
    job.cancel()
    wait_until(lambda: session.turns())
    worker.kill()
    assert session.turns()[0].finish_reason == "cancelled"
    assert run_sync(requeue(job.id), site.client.connection)
    site.burst()
    (turn,) = session.turns()
    assert turn.finish_reason == "stop" and turn.answer["content"] == answer_to("long", 600)


def requeued(site: Site, job: Job) -> None:
    assert run_sync(requeue(job.id), site.client.connection)
    site.burst()


def questions(session: Session) -> list[str]:
    return [turn.messages[0]["content"] for turn in session.turns()]


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("undone", [False, True])
def test_a_requeued_edit_erases_no_later_turn(site: Site, begun: bool, undone: bool) -> None:
    session = open_session(site)
    run(site, session, "a")
    metadata = {"fail": "out_of_memory"} if begun else {}
    job = session.submit("b", edit=True, metadata=metadata)
    if begun:
        site.burst()
    else:
        job.cancel()
    if undone:  # as many turns as before
        session.undo()
    run(site, session, "c")
    before = questions(session)
    requeued(site, job)
    with pytest.raises(JobError, match="send its messages as a new edit") as caught:
        job.result(timeout=1)
    assert caught.value.code == "invalid_request"
    assert questions(session) == before == (["c"] if undone else ["a", "c"])


def test_a_requeued_edit_replaces_the_turn_that_is_still_the_last(site: Site) -> None:
    session = open_session(site)
    run(site, session, "a", "b")
    job = session.submit("c", edit=True, metadata={"fail": "out_of_memory"})
    site.burst()
    assert questions(session) == ["a", "b"] and job.status() is Status.FAILED
    data = site.redis.hget(job_key(job.id), "data").replace(b"out_of_memory", b"")
    site.redis.hset(job_key(job.id), "data", data.replace(b'"fail"', b'"none"'))
    requeued(site, job)
    assert questions(session) == ["a", "c"]


def test_a_requeued_edit_that_was_stopped_replaces_its_own_answer(site: Site) -> None:
    session = open_session(site)
    run(site, session, "a")
    worker = site.worker(delay=0.02)
    job = session.submit("long", edit=True, metadata={"words": "600"})
    next(job.stream())
    job.cancel()
    wait_until(lambda: questions(session) == ["long"])
    worker.kill()
    requeued(site, job)
    (turn,) = session.turns()
    assert turn.finish_reason == "stop" and turn.answer["content"] == answer_to("long", 600)


def test_an_edit_that_a_killed_worker_had_begun_replaces_its_turn(site: Site) -> None:
    session = open_session(site)
    run(site, session, "a")
    frozen = site.worker(delay=0.02)
    session.submit("b", edit=True, metadata={"words": "500"})
    wait_until(lambda: site.redis.zcard(f"rq:wip:{QUEUE}"))
    frozen.kill()
    worker = site.worker()
    wait_until(lambda: questions(session) == ["b"])
    assert worker.stop() == 0


def test_an_id_that_is_used_again_appends_other_messages(site: Site) -> None:
    session = open_session(site)
    for content in ("a", "b", "c"):
        job = session.submit(content, job={"id": "again"})
        site.burst()
        site.redis.delete(job_key(job.id))  # as when its result has expired
    assert questions(session) == ["a", "b", "c"]


def test_a_request_that_is_sent_again_replaces_its_own_turn(site: Site) -> None:
    session = open_session(site)
    for _ in range(2):
        job = session.submit("a", job={"id": "again"})
        site.burst()
        site.redis.delete(job_key(job.id))
    assert questions(session) == ["a"]


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
    upkeep = JobStore(site.redis, ["fake"], "w1", "rq:worker:w1").maintenance

    def have_failed() -> bool:
        upkeep.step()
        return late.status() is last.status() is Status.FAILED

    wait_until(have_failed)
    with pytest.raises(JobError, match=r"its ttl of 0\.05 s \(job\.ttl\): submit it again"):
        late.result(timeout=1)
    site.burst()
    assert [message["content"] for message in session.history()[::2]] == ["a"]


def enqueue_by_rq(site: Site, session: str) -> RQJob:
    request = {"model": "fake", "messages": [USER], "job": {"session": session}}
    queue = Queue(QUEUE, connection=site.redis, serializer=JSONSerializer)
    return queue.enqueue(CHAT.func, kwargs={"request": request})


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
