"""Scoring jobs go through the queues of chats, each with a row and a result per item."""

from __future__ import annotations

import asyncio
import math
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
from rq import Queue
from rq.serializers import JSONSerializer

from jobs import (
    AsyncClient,
    ChatCompletion,
    JobError,
    LogLikelihood,
    NobodyServes,
    ScoreRequest,
    ScoreResult,
    WaitTimeout,
    keys,
)
from jobs.api.score_request import parse_item
from jobs.api.score_result import ContinuationScore, ScoredItem
from jobs.client.job import ScoreJob
from jobs.operations import OPERATIONS, SCORE, Operation
from jobs.store.connection.protocol import run_sync
from jobs.store.purge import purge
from tests.worker.fake_backend import FakeBackend, text_of
from tests.worker.queue.rq_jobs import fetch
from tests.worker.site import PATIENCE, Site
from worker.backend import Outcome, Sink

OWN = keys.queue_for(SCORE.func, "chat:fake")  # where other versions move such jobs


class Scores(FakeBackend):
    """Scores continuations by their lengths, at once. `fails`: how many jobs fail first."""

    def __init__(self, fails: int = 0) -> None:
        super().__init__()
        self.fails, self.costs = fails, list[int]()

    def submit(self, operation: Operation, request: Any, sink: Sink) -> Any:
        if operation is not SCORE:
            return super().submit(operation, request, sink)
        self.costs.append(operation.cost(request))
        if self.fails:
            self.fails -= 1
            sink.ended(Outcome(error=JobError("internal", "requested by the test")))
        else:
            items = [scored(item) for item in request.items]
            sink.ended(Outcome(result=ScoreResult(created=1, model="fake", items=items)))
        return SimpleNamespace(cancel=lambda: None)


def scored(given: Any) -> ScoredItem:
    try:
        item = parse_item(given)
    except JobError as error:
        return ScoredItem(error=error.to_dict())
    assert isinstance(item, LogLikelihood)
    scores = [
        ContinuationScore(
            logprob_sum=-float(len(text)),
            is_greedy=False,
            tokens=1,
            bytes=len(text),
            token_ids=[1],
            token_logprobs=[-float(len(text))],
            prompt_tokens=1,
        )
        for text in item.continuations
    ]
    return ScoredItem(type=item.type, custom_id=item.custom_id, continuations=scores)


def item(*continuations: str, **fields: Any) -> dict[str, Any]:
    return {"type": "loglikelihood", "prompt": "a", "continuations": [*continuations], **fields}


def submit(site: Site, *items: Any, **options: Any) -> ScoreJob:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NobodyServes)
        request: Any = {"model": "fake", "items": list(items), "job": options}
        job: ScoreJob = site.client.submit(request)
        return job


def values(site: Site, run: str = "default") -> dict[tuple[int, int, int], Any]:
    """The scores in the rows of a run, by their keys; each key once."""
    names = ("row_index", "repeat_index", "choice_index")
    rows = site.rows(run)
    found = {tuple(row[name] for name in names): row["logprob_sum"] for row in rows}
    assert len(found) == len(rows)
    return found


def test_results_are_typed_and_rows_have_their_keys_beside_those_of_chats(site: Site) -> None:
    first = submit(site, item("b", "cc"), item("ddd", repeat=1), run="r", row=4)
    chat = site.submit(run="c")
    second = site.client.submit(
        ScoreRequest(model="fake", items=[LogLikelihood(prompt="a", continuations=["b"], row=9)])
    )
    backend = Scores()
    site.burst(backend)
    assert sorted(backend.costs) == [1, 3]
    result = first.result(timeout=1)
    assert isinstance(result, ScoreResult)
    assert result.items[0].continuations is not None
    assert [one.logprob_sum for one in result.items[0].continuations] == [-1.0, -2.0]
    assert values(site, "r") == {(4, 0, 0): -1.0, (4, 0, 1): -2.0, (5, 1, 0): -3.0}
    assert values(site) == {(9, 0, 0): -1.0}
    completion = chat.result(timeout=1)
    assert isinstance(completion, ChatCompletion) and completion.text == text_of(chat.request)
    assert site.client.gather(first, second, timeout=1) == [result, second.result(timeout=1)]
    again: Any = site.client.job(first.id)  # by its id, from any process
    assert isinstance(again.request, ScoreRequest)
    assert again.request.items == first.request.items
    assert {row["operation"] for row in site.rows("r")} == {"loglikelihood"}


def test_asyncio_has_the_same_jobs(site: Site) -> None:
    job = submit(site, item("b"))
    site.burst(Scores())

    async def read() -> ScoreResult:
        client = AsyncClient(site.url)
        try:
            submitted = await client.submit_many([{"model": "fake", "items": [item("b")]}])
            assert await submitted[0].cancel()
            found: Any = await client.job(job.id).result(timeout=1)
            return found
        finally:
            await client.close()

    assert asyncio.run(read()) == job.result(timeout=1)


def test_bad_items_are_errors_of_their_own_and_the_job_finishes(site: Site) -> None:
    job = submit(site, item("b"), {"type": "foo"}, 7, item(), run="r", row=0)
    site.burst(Scores())
    good, *bad = job.result(timeout=1).items
    assert good.error is None
    assert [one.failure.code for one in bad if one.failure] == ["invalid_request"] * 3
    statuses = {row["row_index"]: (row["status"], row["error_type"]) for row in site.rows("r")}
    assert statuses == {
        0: ("ok", None),
        **dict.fromkeys((1, 2, 3), ("error", "invalid_request")),
    }


def test_a_bad_request_of_another_producer_fails_with_a_row_for_each_key(
    site: Site, queue: Queue
) -> None:
    twice: Any = {"model": "fake", "items": [item("b", row=3)] * 2, "job": {"run": "r"}}
    bad: Any = {"model": "fake", "items": [item("b", row=5), item("b", row=6)], "job": {"run": "r"}}
    jobs = [queue.enqueue(SCORE.func, request=one) for one in (twice, {**bad, "truncate": 5})]
    site.burst(Scores())
    for job, words in zip(jobs, ("have one row", "truncate"), strict=True):
        with pytest.raises(JobError, match=words):
            site.client.job(job.id).result(timeout=1)
    assert {key[0]: row["status"] for key, row in keyed(site).items()} == dict.fromkeys(
        (3, 5, 6), "error"
    )


def keyed(site: Site) -> dict[tuple[int, int], Any]:
    return {(row["row_index"], row["choice_index"]): row for row in site.rows("r")}


def test_a_failed_job_is_tried_again_and_its_rows_written_once(site: Site) -> None:
    job = submit(site, item("b"), item("cc"), run="r", row=0, retries=1)
    site.burst(Scores(fails=1))
    assert job.status() == "finished"
    assert values(site, "r") == {(0, 0, 0): -1.0, (1, 0, 0): -2.0}
    assert {row["attempt"] for row in site.rows("r")} == {2}
    failed = submit(site, item("b"), item("cc"), run="f", row=0, retries=0)
    site.burst(Scores(fails=1))
    with pytest.raises(JobError, match="requested by the test"):
        failed.result(timeout=1)
    assert [row["error_type"] for row in site.rows("f")] == ["internal"] * 2


def test_cancel_ttl_tenants_and_priorities_are_those_of_chats(site: Site) -> None:
    cancelled = submit(site, item("b"), item("c"), run="r", row=0)
    tenant = submit(site, item("b"), tenant="t", priority="bulk")
    assert cancelled.cancel()
    assert site.redis.lrange(keys.tenant_queue("bulk:fake", "t"), 0, -1) == [tenant.id.encode()]
    late = submit(site, item("b"), ttl=0.001, run="late", row=0)
    site.burst(Scores())
    assert tenant.status() == "finished"
    for job, code in ((cancelled, "cancelled"), (late, "timeout")):
        with pytest.raises(JobError) as caught:
            job.result(timeout=PATIENCE)
        assert caught.value.code == code
    assert [row["status"] for row in site.rows("r")] == ["cancelled"] * 2


def test_the_same_request_of_a_row_is_the_same_job(site: Site) -> None:
    first, again = (submit(site, item("b"), run="r", row=0) for _ in range(2))
    assert (again.id, again.existed_before) == (first.id, True)
    with pytest.raises(JobError, match="row 0"):
        submit(site, item("c"), run="r", row=0)
    site.burst(Scores())
    assert len(values(site, "r")) == 1


def test_a_row_of_an_item_belongs_to_one_job_whatever_it_is_packed_with(site: Site) -> None:
    first = submit(site, item("b", row=7), item("c", row=150, repeat=2), run="r")
    assert submit(site, item("b", row=7), item("c", row=150, repeat=2), run="r").id == first.id
    other = [item("d", row=8), item("c", row=150, repeat=2)]
    for _ in range(2):  # while it waits, and when its rows are written
        with pytest.raises(JobError, match="row 150 of run 'r' is taken") as caught:
            submit(site, *other, run="r")
        assert caught.value.param == "job.row"
        site.burst(Scores())
    submit(site, item("d", row=8), item("c", row=150), run="r")  # another sample
    site.burst(Scores())
    assert values(site, "r").keys() == {(7, 0, 0), (150, 2, 0), (8, 0, 0), (150, 0, 0)}
    site.redis.delete(f"rq:job:{first.id}")  # as when its result has expired
    assert submit(site, item("b", row=7), item("c", row=150, repeat=2), run="r").id == first.id
    assert not site.redis.exists(f"rq:job:{first.id}")


def test_rows_of_a_job_that_left_redis_without_them_are_free(site: Site) -> None:
    lost = submit(site, item("b", row=0), item("c", row=1), run="r")
    site.redis.delete(f"rq:job:{lost.id}", "rq:queue:chat:fake")  # as after `rq empty`
    submit(site, item("c", row=1), item("d", row=2), run="r")
    ended = submit(site, item("e", row=3), item("f", row=4), run="r")
    fetch(site, ended).cancel()  # by RQ's own tools: it has no row until a worker looks
    assert run_sync(purge(ended.id), site.client.connection)
    submit(site, item("e", row=3), run="r")
    site.burst(Scores())
    assert values(site, "r").keys() == {(1, 0, 0), (2, 0, 0), (3, 0, 0)}


def test_a_job_waits_for_a_worker_that_runs_it(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker of 0.2.0 moves it to a queue of its own, where one of this version looks."""
    job = submit(site, item("b"))
    with monkeypatch.context() as older:
        older.delitem(OPERATIONS, SCORE.func)
        site.burst()
    assert job.status() == "queued"
    assert site.redis.lrange(f"rq:queue:{OWN}", 0, -1) == [job.id.encode()]
    site.burst(Scores())
    assert job.result(timeout=1).items[0].error is None
    assert fetch(site, job).origin == OWN
    assert len(site.rows()) == 1


def test_clients_say_that_no_worker_runs_it(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    words = f"no worker runs {SCORE.func} for 'fake' \\(functions run now: worker.tasks.chat"
    status = {
        **{"name": "w", "host": "h", "device": "cpu", "paused": "", "models": ["fake"]},
        **{"names": ["fake"], "memory": {"weights": 1, "cache": 1}, "running": 0},
        **{"tokens_per_second": 0.0, "funcs": ["worker.tasks.chat_completion"]},
    }
    import json

    site.redis.zadd(keys.WORKERS, {"w": 2**52})
    site.redis.set(keys.worker("w"), json.dumps(status))
    with pytest.warns(NobodyServes, match=words):
        job = site.client.submit({"model": "fake", "items": [item("b")]})
    with pytest.raises(WaitTimeout, match=words):
        job.result(timeout=0.05)
    site.redis.delete(keys.WORKERS, keys.worker("w"))


def test_it_has_no_stream(site: Site) -> None:
    job = submit(site, item("b"))
    site.burst(Scores())
    with pytest.raises(JobError, match="has scores and no stream"):
        list(job.stream(timeout=1))
    assert not site.redis.exists(keys.log(job.id))


def test_jobs_of_rq_on_the_own_queue_are_run(site: Site) -> None:
    own = Queue(f"bulk:fake {SCORE.func}", connection=site.redis, serializer=JSONSerializer)
    job = own.enqueue(SCORE.func, request={"model": "fake", "items": [item("b")]})
    site.burst(Scores())
    assert math.isclose(values(site).popitem()[1], -1.0)
    assert site.client.job(job.id).status() == "finished"
