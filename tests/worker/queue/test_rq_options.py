"""Options of RQ's `enqueue` on chat jobs: each is done, or refused by name."""

from __future__ import annotations

import inspect
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from rq import Callback, Queue, Repeat, Retry
from rq.job import Dependency
from rq.job import Job as RQJob

from jobs.operations import CHAT
from tests.worker.site import ROOT, Site

REQUEST = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
FUNCTION = "some.module.function"

REFUSED: dict[str, dict[str, Any]] = {
    "on_success": {"on_success": Callback(FUNCTION)},
    "on_failure": {"on_failure": Callback(FUNCTION)},
    "on_stopped": {"on_stopped": Callback(FUNCTION)},
    "repeat": {"repeat": Repeat(times=2, interval=1)},
}
DONE: dict[str, dict[str, Any]] = {
    "job_timeout": {"job_timeout": 60},
    "result_ttl": {"result_ttl": 60},
    "failure_ttl": {"failure_ttl": 60},
    "ttl": {"ttl": 60},
    "description": {"description": "about it"},
    "job_id": {"job_id": "mine"},
    "at_front": {"at_front": True},
    "meta": {"meta": {"mine": 1}},
    "retry": {"retry": Retry(max=1)},
    "unique": {"job_id": "mine", "unique": True},
}
OF_FUNCTIONS = {"f", "args", "kwargs", "pipeline"}  # not of the job


def enqueue(queue: Queue, **options: Any) -> RQJob:
    return queue.enqueue(CHAT.func, kwargs={"request": REQUEST}, **options)


@pytest.mark.parametrize("option", REFUSED)
def test_an_option_that_chat_workers_do_not_have_fails_the_job_by_its_name(
    site: Site, queue: Queue, option: str, caplog: pytest.LogCaptureFixture
) -> None:
    job = enqueue(queue, **REFUSED[option])
    site.burst()
    assert job.get_status() == "failed"
    (row,) = site.rows()
    assert row["error_type"] == "invalid_request"
    assert f"RQ's option {option}" in row["error_message"]
    assert f"RQ's option {option}" in caplog.text
    assert job.id in caplog.text


def test_webhooks_are_refused(site: Site, queue: Queue) -> None:
    job = enqueue(queue)
    site.redis.hset(job.key, "webhooks", '[{"url": "https://example.com"}]')
    site.burst()
    assert job.get_status() == "failed"
    assert "RQ's option webhooks" in site.rows()[0]["error_message"]


@pytest.mark.parametrize("option", DONE)
def test_the_other_options_let_the_job_run(site: Site, queue: Queue, option: str) -> None:
    job = enqueue(queue, **DONE[option])
    site.burst()
    assert job.get_status() == "finished"


@pytest.mark.parametrize("allow_failure", [True, False])
def test_a_job_that_depends_on_a_chat_job_runs_after_it_as_the_error_advises(
    site: Site, queue: Queue, allow_failure: bool
) -> None:
    job = enqueue(queue)
    after = enqueue(queue, depends_on=Dependency(job, allow_failure=allow_failure))
    assert after.get_status() == "deferred"
    site.burst()
    assert job.get_status() == after.get_status() == "finished"


def test_a_job_can_be_enqueued_each_time_as_the_error_advises(site: Site, queue: Queue) -> None:
    jobs = [enqueue(queue), queue.enqueue_in(timedelta(0), CHAT.func, request=REQUEST)]
    site.burst()
    assert [job.get_status() for job in jobs] == ["finished", "finished"]
    assert len(site.rows()) == 2


def test_the_documentation_names_every_option_of_rq() -> None:
    source = inspect.getsource(Queue.parse_args)
    options = set(re.findall(r"kwargs\.pop\('(\w+)'", source)) - OF_FUNCTIONS
    assert {"on_success", "job_timeout"} <= options
    page = Path(ROOT, "docs/limits.md").read_text().partition("## Jobs of RQ's own tools")[2]
    assert {option for option in options if f"`{option}`" not in page} == set()
