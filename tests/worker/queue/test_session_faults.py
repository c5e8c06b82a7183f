"""Faults of Redis, and foreign values in the keys of sessions, while their jobs are claimed."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from redis.exceptions import NoScriptError, ReadOnlyError, ResponseError

from jobs import JobError, keys
from tests.worker.queue.test_rq_store import claim
from tests.worker.site import Site
from worker.queue.rq_sessions import RQSessions
from worker.queue.rq_store import RQStore


class Replies:
    """A Redis that replies to each script with the same error."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def register_script(self, script: str) -> Any:
        return lambda **_: None

    def pipeline(self, **_: Any) -> Replies:
        return self

    def execute(self, **_: Any) -> list[Exception]:
        return [self._error]


@pytest.mark.parametrize(
    "error",
    [
        NoScriptError("No matching script"),  # Redis was started again between two commands
        ReadOnlyError("You can't write against a read only replica."),
        ResponseError("NOREPLICAS Not enough good replicas to write."),
        redis.ConnectionError("closed"),
    ],
)
def test_a_fault_of_redis_fails_no_job(site: Site, store: RQStore, error: Exception) -> None:
    site.client.session("s", model="fake").submit("hello")
    (job,) = claim(store)
    with pytest.raises(type(error)):
        RQSessions(Replies(error)).begin([job])  # type: ignore[arg-type]


def test_foreign_turns_fail_their_job_alone(site: Site) -> None:
    broken = site.client.session("broken", model="fake").submit("hello")
    whole = site.client.session("whole", model="fake").submit("hello")
    site.redis.delete(keys.turns("broken"))
    site.redis.set(keys.turns("broken"), "foreign")
    site.burst()
    with pytest.raises(JobError, match="WRONGTYPE"):
        broken.result(timeout=1)
    assert whole.result(timeout=1).text


def test_a_job_that_waits_for_foreign_keys_does_not_stop_the_worker(site: Site) -> None:
    session = site.client.session("s", model="fake")
    first, second = (session.submit(text, wait=True) for text in ("one", "two"))
    other = site.submit("other")
    site.redis.delete(keys.open_turns("s"))
    site.redis.set(keys.open_turns("s"), "foreign")
    site.worker()
    assert other.result(timeout=30).text
    assert first.cancel() or first.status().over
    assert second.status() == "deferred"
