"""A job for a model that nobody serves says so when it is submitted."""

from __future__ import annotations

import asyncio
import json
import warnings
from typing import Any, get_type_hints

import pytest
from click.testing import CliRunner

from jobs import AsyncClient, Client, NobodyServes, keys
from jobs.api.params import RequestFields
from jobs.cli import build
from jobs.client import serving
from jobs.errors import InvalidRequest
from jobs.store.worker_status import WorkerStatus, read_statuses
from tests.jobs.conftest import STATUS, publish_worker

REQUEST: RequestFields = {"model": "other", "messages": [{"role": "user", "content": "hi"}]}


def test_the_warning_names_the_model_and_those_that_are_served(client: Client) -> None:
    publish_worker(client, "demo", "a/b")
    with pytest.warns(NobodyServes) as caught:
        job = client.submit(REQUEST)
    assert job.status() == "queued"
    (warning,) = caught
    assert str(warning.message) == (
        "no worker serves 'other' (models served now: a/b, demo; chatjobs work --model other "
        "starts one): its jobs wait until one does; chatjobs submit --model M submits to one that "
        "is served, the rows of a run with another --run"
    )
    assert warning.filename == __file__


def test_a_model_that_is_served_gives_no_warning(client: Client) -> None:
    publish_worker(client, "other")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        client.submit_many([REQUEST] * 3)


def reads_of_workers(client: Client) -> int:
    """The number of reads so far: one MGET each, since there is a worker."""
    found = client.redis.info("commandstats").get("cmdstat_mget", {"calls": 0})
    return int(found["calls"])


def test_the_workers_are_read_once_in_some_seconds(
    client: Client, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But each model is named once, and so is each again after some seconds."""
    publish_worker(client, "demo")
    monkeypatch.setattr(serving, "CHECK_SECONDS", 600.0)
    before = reads_of_workers(client)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for model in ("x", "y", "x", "y"):
            client.submit_many([{**REQUEST, "model": model}] * 10)
        assert reads_of_workers(client) == before + 1
        assert ["'x'" in str(one.message) for one in caught] == [True, False]
        monkeypatch.setattr(serving, "CHECK_SECONDS", 0.0)
        with Client(redis_url) as later:
            later.submit({**REQUEST, "model": "x"})
            later.submit({**REQUEST, "model": "x"})
    assert reads_of_workers(client) == before + 3
    assert len(caught) == 4
    assert "models served now: demo" in str(caught[3].message)


@pytest.mark.parametrize(
    ("workers", "is_taken"),
    [
        ([], True),  # it waits for a worker
        ([True], True),
        ([None], True),  # of a version that does not say it
        ([False], False),
        ([True, None], True),
        ([True, False], False),  # either may get the job
    ],
)
def test_a_template_is_taken_if_all_workers_of_its_model_take_one(
    client: Client, workers: list[bool | None], is_taken: bool
) -> None:
    said: list[Any] = [{"templates": {"other": one}} if one is not None else {} for one in workers]
    statuses = [{**STATUS, "names": ["other", "more"], **one} for one in said]
    statuses.append({**STATUS, "names": ["demo"], "templates": {"demo": False}})
    for number, status in enumerate(statuses):
        client.redis.zadd(keys.WORKERS, {f"w{number}": 1})
        client.redis.set(keys.worker(f"w{number}"), json.dumps({**status, "name": f"w{number}"}))
    brings: RequestFields = {**REQUEST, "chat_template": "{{ messages }}"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NobodyServes)
        assert client.submit(REQUEST).status() == "queued"
        if is_taken:
            assert client.submit(brings).status() == "queued"
            return
        with pytest.raises(InvalidRequest, match="the model other takes no template") as caught:
            client.submit(brings)
        assert (caught.value.code, caught.value.param) == ("invalid_request", "chat_template")
        assert "--trust-request-chat-template" in caught.value.message
        with pytest.raises(InvalidRequest, match=r"request 1: chat_template: .* 2 of 3 requests"):
            client.submit_many([REQUEST, brings, REQUEST])


def test_what_a_worker_serves_that_publishes_nothing_is_not_known(client: Client) -> None:
    publish_worker(client, "demo")
    client.redis.zadd(keys.WORKERS, {"odd": 1e300})  # of no worker, so that nobody removes it
    found = read_statuses(client.redis)
    assert found.silent == ["dead"]
    assert (found.able("w1"), found.able("dead")) == (None, {"demo"})


def test_asyncio_warns_in_the_line_of_the_caller(client: Client, redis_url: str) -> None:
    async def main() -> None:
        async with AsyncClient(redis_url) as aclient:
            await aclient.submit(REQUEST)

    with pytest.warns(NobodyServes) as caught:
        asyncio.run(main())
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    "value",
    [
        *("[]", "x", "null", "3", "{}", b"\xff", '{"names":["a"]}'),
        *(json.dumps({**STATUS, name: None}) for name in STATUS),
        json.dumps({**STATUS, "names": [3]}),
        json.dumps({**STATUS, "memory": {"weights": "x", "cache": 1}}),
        json.dumps({**STATUS, "rss": 10**400}),
        json.dumps({**STATUS, "host": "\ud800"}),
        json.dumps({**STATUS, "tokens_per_second": float("nan")}),
        *(json.dumps({**STATUS, name: [[]]}) for name in get_type_hints(WorkerStatus)),
        *(json.dumps({**STATUS, "loading": one}) for one in ("x", ["m"], {"m": "m"}, {"m": [3]})),
        *(json.dumps({**STATUS, "versions": one}) for one in ("x", ["m"], {"m": "m"}, {"m": {}})),
        json.dumps({**STATUS, "versions": {"m": {"model_fingerprint": "f", "dtype": 3}}}),
        *(json.dumps({**STATUS, "contexts": one}) for one in ("x", ["m"], {"m": "4"})),
        *(json.dumps({**STATUS, "templates": one}) for one in ("x", ["m"], {"m": 1})),
    ],
)
def test_a_foreign_value_of_a_worker_stops_no_submit(
    client: Client, redis_url: str, value: Any
) -> None:
    publish_worker(client, "other")
    foreign: dict[Any, int] = {"ww": 3, b"\xff\xfe": 4}
    client.redis.zadd(keys.WORKERS, foreign)
    client.redis.set(keys.worker("ww"), value)
    assert client.submit(REQUEST).status() == "queued"
    shown = CliRunner().invoke(build(), ["status", "--json", "--redis", redis_url])
    found = json.loads(shown.stdout)
    assert [one["name"] for one in found["workers"]] == ["w1"]
    assert {one["key"] for one in found["damaged"]} == {keys.WORKERS, keys.worker("ww")}
