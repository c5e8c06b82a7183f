"""`--timeout` of the commands that print a stream."""

from __future__ import annotations

from typing import Any

from jobs import Client
from tests.cli.conftest import Run
from tests.jobs.conftest import publish_worker

REQUEST: Any = {"model": "demoo", "messages": [{"role": "user", "content": "hi"}]}


def test_follow_ends_with_the_cause_and_leaves_the_job(run: Run, redis_url: str) -> None:
    with Client(redis_url) as client:
        publish_worker(client, "demo")
        client.serving = None
        job = client.submit(REQUEST)
        result = run("follow", job.id, "--timeout", "0.1", "--redis", redis_url)
        assert job.status() == "queued"
    assert result.exit_code == 1
    assert result.stderr.endswith(
        f"error: no chunk of job {job.id} for 0.1 s (status: queued): no worker serves 'demoo' "
        "(models served now: demo; chatjobs work --model demoo starts one); it is not cancelled, "
        "and can be waited for again (timeout)\n"
    )


def test_chat_ends_with_the_cause_and_cancels_its_job(run: Run, redis_url: str) -> None:
    with Client(redis_url) as client:
        publish_worker(client, "demoo")
        result = run("chat", "-m", "demoo", "hi", "--timeout", "0.1", "--redis", redis_url)
        (key,) = client.redis.keys("rq:job:*")
        assert client.job(key.decode().removeprefix("rq:job:")).status() == "cancelled"
    assert result.exit_code == 1
    assert "is the next one for 'demoo'; it is cancelled (timeout)\n" in result.stderr


def test_a_time_that_is_none_is_wrong_usage(run: Run) -> None:
    result = run("follow", "j", "--timeout", "soon")
    assert result.exit_code == 2
    assert "'soon' is not a number of seconds" in result.stderr
