"""A submit that Redis refuses in the middle leaves nothing behind: it can be repeated."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
from click.testing import CliRunner

from jobs import Client, JobError, keys
from jobs.cli import build
from jobs.store.rq_layout import job_key, queue_key

QUEUE = keys.chat_queue("demo")
LINE = queue_key(QUEUE)


def request(**job: Any) -> Any:
    messages = [{"role": "user", "content": "hi"}]
    return {"model": "demo", "messages": messages, "job": {"id": "mine", **job}}


@pytest.mark.parametrize(
    ("command", "undo", "options"),
    [
        (("hset", keys.OPEN_BYTES, LINE, "x"), ("hdel", keys.OPEN_BYTES, LINE), {}),
        (("set", keys.DEADLINES, "x"), ("delete", keys.DEADLINES), {"ttl": 60}),
        (("set", keys.tenants(QUEUE), "x"), ("delete", keys.tenants(QUEUE)), {"tenant": "a"}),
        (
            ("hset", keys.TENANT_JOBS, QUEUE, "x"),
            ("hdel", keys.TENANT_JOBS, QUEUE),
            {"tenant": "a"},
        ),
    ],
    ids=["bytes", "deadlines", "tenants", "tenant-jobs"],
)
def test_a_refused_submit_leaves_nothing_behind(
    client: Client, command: tuple[str, ...], undo: tuple[str, ...], options: dict[str, Any]
) -> None:
    client.submit(request(id="other"))  # else the queue's bytes are reset
    wanted = request(run="r", row=3, **options)
    getattr(client.redis, command[0])(*command[1:])
    with pytest.raises(JobError):
        client.submit(wanted)
    assert not client.redis.exists(job_key("mine"), keys.rows("r", 3))
    assert client.redis.lrange(LINE, 0, -1) == [b"other"]
    assert not client.redis.exists(keys.tenant_queue(QUEUE, "a"))
    getattr(client.redis, undo[0])(*undo[1:])
    client.submit(wanted)
    line = keys.tenant_queue(QUEUE, "a") if "tenant" in options else LINE
    assert client.redis.lpos(line, "mine") is not None
    assert client.job("mine").status() == "queued"


def test_a_refused_turn_leaves_its_session_free(client: Client) -> None:
    client.submit(request(id="other"))
    session = client.session("s", model="demo")
    client.redis.hset(keys.OPEN_BYTES, LINE, "x")
    with pytest.raises(JobError):
        session.submit("one")
    client.redis.hdel(keys.OPEN_BYTES, LINE)
    assert not client.redis.exists(keys.open_turns("s"))
    assert session.submit("one").status() == "queued"


def test_a_job_is_enqueued_although_nobody_can_be_woken(client: Client) -> None:
    client.redis.set(keys.wake("chat:demo"), "x")
    client.submit(request())
    assert client.redis.lrange(LINE, 0, -1) == [b"mine"]


@pytest.mark.parametrize("model", ["demo", "a model's"])
@pytest.mark.parametrize(("limit", "enough"), [("jobs", "2"), ("bytes", "100000")])
def test_a_full_queue_names_the_limit_and_the_command_that_raises_it(
    client: Client, redis_url: str, limit: str, enough: str, model: str
) -> None:
    client.serving = None
    client.redis.hset(keys.LIMITS, limit, 1 if limit == "jobs" else 300)
    first: Any = {**request(id="one"), "model": model}
    second: Any = {**request(id="two"), "model": model}
    client.submit(first)
    with pytest.raises(JobError, match=rf"the limit \({limit}\) is ") as caught:
        client.submit(second)
    assert caught.value.code == "queue_full" and repr(model) in str(caught.value)
    found = re.search(r"\(chatjobs (limits .*)\)$", caught.value.message)
    assert found is not None
    words = shlex.split(found[1].replace("=N", f"={enough}"))
    assert CliRunner().invoke(build(), [*words, "--redis", redis_url]).exit_code == 0
    assert client.submit(second).status() == "queued"
