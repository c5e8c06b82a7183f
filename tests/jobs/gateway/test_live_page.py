"""The live page and the figures that it shows, without a browser (tests/browser/test_live.py)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from jobs import AsyncClient, Client, JobError, keys
from jobs.gateway import run_progress
from jobs.gateway.run_progress import RunReader
from jobs.results.files import Results
from jobs.results.run_json import RunJson
from jobs.testing import FakeWorker
from tests.cli.conftest import UNREACHABLE
from tests.jobs.conftest import StepwiseWorker, publish_worker
from tests.jobs.gateway.in_process import ask, send
from tests.jobs.scores.runs import make_run

KEYS = '[tenants.a]\nkeys = ["first"]\n[tenants.b]\nkeys = ["second"]\n'
PAGE = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest.fixture
def keyed(tmp_path: Path) -> dict[str, Any]:
    """The settings of a gateway with keys."""
    file = tmp_path / "keys.toml"
    file.write_text(KEYS)
    return {"api_key_file": file}


@pytest.fixture
def client(redis_url: str) -> Iterator[Client]:
    with Client(redis_url) as client:
        client.serving = None
        yield client


def status(url: str, results: Path, key: str = "", **settings: Any) -> Any:
    """The figures, or the error of the reply."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    settings = {"redis_url": url, "results": results, **settings}
    reply = ask(partial(AsyncClient, url), "GET", "/status", settings=settings, headers=headers)
    return reply.json()


def submit(client: Client, model: str, **job: Any) -> str:
    body: Any = {"model": model, "messages": [{"role": "user", "content": "hi"}], "job": job}
    return client.submit(body).id


def add_part(root: Path, run: str, part: int, *states: str) -> None:
    """Write a part file with a row of each state, and a second choice of each."""
    rows: list[dict[str, Any]] = [
        {"choice_index": choice, "status": one} for one in states for choice in (0, 1)
    ]
    make_run(root, rows, run)
    samples = root / run / "samples"
    (samples / "part-a.parquet").rename(samples / f"p{part}.parquet")


def test_browsers_get_the_page_and_programs_get_json() -> None:
    with FakeWorker() as worker:
        page = send(worker, "GET", "/", headers=PAGE)
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        for accept in ("*/*", "application/json"):
            other = send(worker, "GET", "/", headers={"accept": accept})
            assert other.json()["name"] == "chatjobs"
            assert page.headers["vary"] == other.headers["vary"] == "accept"


def test_the_page_runs_its_own_files_only() -> None:
    with FakeWorker() as worker:
        page = send(worker, "GET", "/", headers=PAGE)
        policy = dict(
            part.strip().split(" ", 1)
            for part in page.headers["content-security-policy"].split(";")
        )
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["frame-ancestors"] == policy["form-action"] == "'none'"
        assert "unsafe" not in page.headers["content-security-policy"]
        assert not re.search(r"<script(?![^>]* src=)|<style|\sstyle=|\son\w+=|//", page.text)
        for name in re.findall(r'(?:src|href)="(page/[^"]+)"', page.text):
            file = send(worker, "GET", f"/{name}")
            assert file.status_code == 200
            assert file.headers["x-content-type-options"] == "nosniff"
            assert (
                file.headers["content-security-policy"] == page.headers["content-security-policy"]
            )
        script = send(worker, "GET", "/page/live.js").text
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", script
        )
        assert send(worker, "GET", "/page/live.py").json()["error"]["code"] == "unknown_url"


def test_the_page_needs_no_key_and_the_figures_do(keyed: dict[str, Any]) -> None:
    with FakeWorker() as worker:
        assert send(worker, "GET", "/", headers=PAGE, settings=keyed).status_code == 200
        assert send(worker, "GET", "/page/live.js", settings=keyed).status_code == 200
        assert send(worker, "GET", "/status", settings=keyed).status_code == 401


def test_the_figures_are_those_of_queues_workers_jobs_and_runs(
    client: Client, worker: StepwiseWorker, redis_url: str, tmp_path: Path
) -> None:
    publish_worker(client, "m")
    for job in ("done", "broken", "runs", "waits"):
        submit(client, "m", id=job)
    for job in ("done", "broken", "runs"):
        worker.start(job)
    worker.finish("done", "text")
    worker.fail("broken", JobError("timeout", "too slow"))
    submit(client, "unserved", id="other")
    add_part(tmp_path, "r", 0, "ok", "error", "ok")
    RunJson({"state": "running", "expected": 10}).write(tmp_path / "r")
    client.redis.set(keys.producer("r"), "token")

    found = status(redis_url, tmp_path)
    queues = {one["model"]: one for one in found["queues"]}
    assert (queues["m"]["queued"], queues["m"]["running"], queues["m"]["failed"]) == (1, 1, 1)
    assert (queues["m"]["workers"], queues["unserved"]["workers"]) == (1, 0)
    assert [(one["name"], one["host"], one["state"]) for one in found["workers"]] == [
        ("w1", "h", "running")
    ]
    assert [(one["id"], one["workers"]) for one in found["models"]] == [("m", 1)]
    assert [(one["id"], one["state"]) for one in found["jobs"]["running"]] == [("runs", "started")]
    ended = {one["id"]: (one["state"], one["code"]) for one in found["jobs"]["ended"]}
    assert ended == {"done": ("finished", None), "broken": ("failed", "timeout")}
    run = {"run": "r", "state": "running", "rows": 3, "failed": 1, "expected": 10, "unwritten": 0}
    assert found["runs"] == [run]
    client.redis.delete(keys.producer("r"))
    assert status(redis_url, tmp_path)["runs"] == [run | {"state": "interrupted"}]


def test_a_tenant_sees_its_own_jobs_and_runs(
    client: Client,
    worker: StepwiseWorker,
    redis_url: str,
    tmp_path: Path,
    keyed: dict[str, Any],
) -> None:
    publish_worker(client, "m")
    for tenant in ("a", "b"):
        submit(client, "m", id=f"of-{tenant}", tenant=tenant, run=f"{tenant}.eval")
        worker.start(f"of-{tenant}")
        add_part(tmp_path / "results", f"{tenant}.eval", 0, "ok")
    client.redis.zadd(keys.WORKERS, {"w2": 3})
    client.redis.set(keys.worker("w2"), "[]")
    found = status(redis_url, tmp_path / "results", "first", **keyed)
    assert found["tenant"] == "a"
    assert [(one["id"], one["run"]) for one in found["jobs"]["running"]] == [("of-a", "eval")]
    assert [one["run"] for one in found["runs"]] == ["eval"]
    (one,) = found["workers"]
    assert (one["name"], one["host"], one["reason"]) == ("worker 1", None, "")
    assert found["notices"] == [] and found["rows"] is None
    assert "of-b" not in str(found) and "b.eval" not in str(found)
    (notice,) = status(redis_url, tmp_path / "results")["notices"]
    assert keys.worker("w2") in notice


def test_a_damaged_key_is_named_and_the_other_figures_are_shown(
    client: Client, redis_url: str, tmp_path: Path
) -> None:
    publish_worker(client, "m")
    submit(client, "m")
    client.redis.set("rq:wip:chat:m", "of another type")
    found = status(redis_url, tmp_path)
    assert "rq:wip:chat:m" in found["notices"][0]
    assert [one["queued"] for one in found["queues"]] == [1]
    assert found["jobs"] == {"running": [], "ended": []}


def test_of_thousands_of_models_some_are_shown(
    client: Client, redis_url: str, tmp_path: Path
) -> None:
    publish_worker(client, *(f"m{number:04}" for number in range(2000)))
    found = status(redis_url, tmp_path)
    assert [one["id"] for one in found["models"]] == [f"m{number:04}" for number in range(200)]


def test_an_outage_of_redis_is_an_error_that_may_be_tried_again(tmp_path: Path) -> None:
    error = status(UNREACHABLE, tmp_path)["error"]
    assert error["code"] == "unavailable"


def test_each_part_of_a_run_is_read_once(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    count_in = run_progress._count_in

    def count(file: Path) -> Any:
        read.append(file.name)
        return count_in(file)

    monkeypatch.setattr(run_progress, "_count_in", count)
    reader = RunReader(Results(tmp_path))
    add_part(tmp_path, "r", 0, "ok")
    assert [one.rows for one in reader.read(client.redis, {})] == [1]
    add_part(tmp_path, "r", 1, "ok", "cancelled")
    (found,) = reader.read(client.redis, {"r": 2})
    assert (found.rows, found.failed, found.unwritten) == (3, 1, 2)
    assert read == ["p0.parquet", "p1.parquet"]
    (tmp_path / "r" / "samples" / "p1.parquet").write_bytes(b"no Parquet")
    monkeypatch.setattr(run_progress, "READ_SECONDS", -1.0)
    assert [one.rows for one in RunReader(Results(tmp_path)).read(client.redis, {})] == [None]
    (tmp_path / "r" / "samples" / "p0.parquet").unlink()
    monkeypatch.setattr(run_progress, "READ_SECONDS", 600.0)
    assert [one.rows for one in RunReader(Results(tmp_path)).read(client.redis, {})] == [0]
