"""Tables: whole values in pipes, and on terminals of 80 columns no id that is cut or broken."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.cells import cell_len

from jobs import Client, JobError, keys
from jobs.api.params import RequestFields
from tests.cli.conftest import Show
from tests.cli.test_output import OURS
from tests.jobs.conftest import StepwiseWorker

MODEL = "Qwen/Qwen3-Coder-30B-A3B-Instruct"
WORKER = "worker-7d9c5b6f4-x2kqp.chat.svc.cluster.local-12345-9f8e7d"
IDS = ("a" * 32, "b" * 79)
FAILED = "c" * 32
ERROR = "internal: " + "word " * 100


@pytest.fixture
def busy(redis_url: str) -> Iterator[str]:
    """A Redis with jobs that wait, a failed one and a worker."""
    worker = StepwiseWorker(redis_url)
    with Client(redis_url) as client:
        client.serving = None
        request: RequestFields = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
        for name in (*IDS, FAILED):
            client.submit({**request, "job": {"id": name, "run": "nightly-2026-11-25"}})
    worker.start(FAILED)
    worker.fail(FAILED, JobError("internal", ERROR.partition(" ")[2]))
    about = {"memory": {"weights": 1, "cache": 1}, "running": 1, "tokens_per_second": 1}
    about |= {"name": WORKER, "host": "h", "device": "cuda:0", "paused": ""}
    worker.redis.zadd(keys.WORKERS, {WORKER: 1e13})
    worker.redis.set(keys.worker(WORKER), json.dumps(about | {"models": [MODEL], "names": [MODEL]}))
    yield redis_url
    worker.redis.close()


@pytest.mark.parametrize(
    ("command", "whole"),
    [
        ("jobs list", {*IDS, FAILED, MODEL, "nightly-2026-11-25"}),
        ("status", {WORKER, MODEL, f"chat:{MODEL}"}),
    ],
)
def test_ids_and_names_are_whole_on_80_columns_and_in_pipes(
    show: Show, busy: str, command: str, whole: set[str]
) -> None:
    words = (*command.split(), "--redis", busy)
    narrow, pipe = (show(*words, terminal=one).out for one in (True, False))
    narrow = OURS.sub("", narrow)
    assert not whole - set(narrow.split()), narrow
    assert not whole - set(pipe.split()), pipe
    assert max(map(cell_len, narrow.splitlines())) <= 80


def test_a_long_error_is_shortened_on_terminals_alone(show: Show, busy: str) -> None:
    narrow, pipe = (
        show("jobs", "list", "--redis", busy, terminal=one).out for one in (True, False)
    )
    assert ERROR.strip() in pipe
    assert len(pipe.splitlines()) == 1 + 3  # one line per job
    assert "internal: word word" in narrow
    assert "…" in narrow


def test_answers_of_submit_are_whole_in_pipes(show: Show, redis_url: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "hi", "custom_id": "x\ny" * 20}))
    words = ("submit", str(rows), "-m", "m", "--run", "r", "--redis", redis_url)
    job = show(*words).out.strip()
    worker = StepwiseWorker(redis_url)
    worker.start(job)
    worker.finish(job, "first\n" + "漢字 " * 100)
    worker.redis.close()
    narrow, pipe = (show(*words, "--wait", terminal=one).out for one in (True, False))
    header, row = pipe.splitlines()
    assert header.split() == ["line", "custom_id", "job", "status", "tokens", "answer"]
    assert row.split()[1:3] == ["x\\ny" * 20, job]
    assert row.endswith("first " + " ".join(["漢字"] * 100))
    narrow = OURS.sub("", narrow)
    assert {job, "x\\ny" * 20} <= set(narrow.split())
    assert max(map(cell_len, narrow.splitlines())) <= 82  # the custom id alone has 80


@pytest.mark.parametrize("terminal", [False, True])
def test_columns_are_aligned_where_characters_are_escaped(
    show: Show, busy: str, terminal: bool
) -> None:
    worker = StepwiseWorker(busy)
    about = json.loads(worker.redis.get(keys.worker(WORKER)) or b"")
    worker.redis.zadd(keys.WORKERS, {"wörker": 1e13})
    worker.redis.set(
        keys.worker("wörker"), json.dumps(about | {"name": "wörker", "models": ["漢"]})
    )
    worker.redis.close()
    words = ("status", "--redis", busy)
    lines = show(*words, encoding="ascii", columns=400, terminal=terminal).out.splitlines()
    lines = [OURS.sub("", line) for line in lines]
    assert "w\\xf6rker" in lines[2]
    assert {line.index("cuda:0") for line in lines[1:3]} == {lines[0].index("device")}
    narrow = show("jobs", "list", "--redis", busy, encoding="ascii", terminal=True).out
    assert "..." in narrow
    assert max(map(len, OURS.sub("", narrow).splitlines())) <= 80


def test_the_worker_that_started_last_is_the_first_one(show: Show, busy: str) -> None:
    worker = StepwiseWorker(busy)
    about = json.loads(worker.redis.get(keys.worker(WORKER)) or b"")
    for name, started in (("a", 5.0), ("b", 9.0), ("c", 1.0), ("d", "of old")):
        worker.redis.zadd(keys.WORKERS, {name: 1e13})
        worker.redis.set(
            keys.worker(name), json.dumps(about | {"name": name, "started_at": started})
        )
    worker.redis.close()
    lines = show("status", "--redis", busy).out.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["b", "a", "c"]
    workers = json.loads(show("status", "--json", "--redis", busy).out)["workers"]
    assert [worker["name"] for worker in workers][:3] == ["b", "a", "c"]
