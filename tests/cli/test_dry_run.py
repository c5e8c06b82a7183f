"""`chatjobs run --dry-run`: what a run would do, without a row of it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from jobs import ChatRequest, Client
from jobs.keys import bulk_queue
from tests.cli.conftest import UNREACHABLE, Run, Spawn
from tests.cli.test_json import documented
from tests.worker.site import PATIENCE, Site, wait_until
from worker import Engine

Go = Callable[..., Result]


@pytest.fixture
def go(run: Run, site: Site) -> Go:
    def call(file: Path, *words: str, model: str = "fake") -> Result:
        places = ("--redis", site.url, "--results", str(site.folder))
        return run("run", str(file), "-m", model, "--run", "r1", *places, *words)

    return call


def data_set(folder: Path, rows: list[Any]) -> Path:
    file = folder / "data.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    file.write_text("".join(f"{line}\n" for line in lines))
    return file


def prompts(count: int) -> list[Any]:
    return [{"prompt": f"row {number}", "custom_id": f"c{number}"} for number in range(count)]


def test_a_pilot_measures_the_time_and_counts_in_no_run(go: Go, site: Site, tmp_path: Path) -> None:
    site.worker()
    site.wait_for_workers()
    file = data_set(tmp_path, prompts(30))
    result = go(file, "--dry-run", "--price-per-hour", "3.6", "--json", "--num-samples", "2")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert set(found) == documented("run --dry-run")
    assert (found["rows"], found["samples"], found["done"], found["left"]) == (30, 2, 0, 60)
    pilot = found["pilot"]
    assert (pilot["run"], pilot["rows"], pilot["failed"]) == ("r1-pilot", 20, 0)
    rows = site.rows("r1-pilot")
    first, last = (min(row["started_at"] for row in rows), max(row["finished_at"] for row in rows))
    assert pilot["seconds"] == (last - first).total_seconds()
    assert found["seconds"] == pytest.approx(60 / 20 * pilot["seconds"])
    assert found["price"] == pytest.approx(found["seconds"] / 1000)
    assert "no folder 'fake'" in found["models"]["fake"]["unknown"]
    assert found["tokens"]["rows"] == 20  # those of the pilot
    texts = {row["messages"][0]["content"] for row in rows}
    assert len(texts) == 20 and texts < {f"row {number}" for number in range(30)}
    assert {row["custom_id"] for row in rows} == {None}
    assert site.results.runs() == ["r1-pilot"]
    assert not site.redis.exists(bulk_queue("fake"), "chatjobs:rows:r1")
    again = go(file, "--num-samples", "2")
    assert again.stdout == (
        "r1: 30 in with 2 samples each, 60 rows, 0 missing, 0 twice, 0 failed\n"
    ), again.stderr
    done = go(file, "--dry-run", "--num-samples", "2")
    assert (done.exit_code, len(site.rows("r1-pilot"))) == (0, 20)
    assert "30 with 2 samples each, 60 done, 0 to run" in done.stdout
    assert "none: no row is left to run" in done.stdout
    changed = go(file, "--dry-run", "--num-samples", "3")
    assert changed.exit_code == 2
    assert "num-samples: 2 → 3" in changed.stderr


def test_the_tokens_and_the_prompt_are_those_that_the_model_gets(
    go: Go, site: Site, tmp_path: Path
) -> None:
    """Without a worker: by the model's own tokenizer and template."""
    texts = ["What is 2 + 3?", "What is 17 + 25?", "x " * 4000]
    file = data_set(tmp_path, [*({"prompt": text} for text in texts), '{"prompt": '])
    result = go(file, "--dry-run", "--json", model="demo")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    engine = Engine.load("demo")
    ids = [
        engine.prompt_ids(ChatRequest(model="demo", messages=[{"role": "user", "content": text}]))
        for text in texts[:2]
    ]
    counts = [len(one) for one in ids]
    assert found["tokens"] == {
        "rows": 2,
        "min": min(counts),
        "mean": sum(counts) / 2,
        "max": max(counts),
    }
    assert engine.tokenizer.encode(found["first_prompt"], add_special_tokens=False) == ids[0]
    assert found["errors"] == {"context_length_exceeded": 1, "invalid_request": 1}
    assert found["too_long"] == 1
    assert [error.partition(":")[0] for error in found["first_errors"]] == ["line 3", "line 4"]
    assert found["models"]["demo"]["fits"]
    assert found["models"]["demo"]["context_length"] == engine.context_length
    assert (found["pilot"], found["seconds"]) == (None, None)
    assert "no worker serves 'demo'" in found["no_pilot"]
    assert not site.redis.keys("rq:job:*")
    text = go(file, "--dry-run", "--max-error-rate", "0.5", model="demo")
    assert text.exit_code == 0
    assert "rows        4, 0 done, 2 to run, 2 will fail" in text.stdout
    assert text.stdout.endswith(f"first prompt:\n{found['first_prompt']}\n")


def test_without_redis_the_data_set_is_described(run: Run, tmp_path: Path) -> None:
    result = run("run", str(data_set(tmp_path, prompts(3))), "-m", "fake", "--dry-run")
    assert result.exit_code == 3
    assert "3, 0 done, 3 to run" in result.stdout
    (error,) = result.stderr.splitlines()
    assert "Redis" in error and UNREACHABLE.partition("//")[2].partition("/")[0] in error
    assert f"none: {error.removeprefix('error: ')}\n" in result.stdout
    refused = run("run", str(tmp_path / "data.jsonl"), "-m", "fake", "--price-per-hour", "1")
    assert (refused.exit_code, refused.stdout) == (2, "")


def test_ctrl_c_cancels_the_jobs_of_the_pilot(site: Site, tmp_path: Path, spawn: Spawn) -> None:
    site.worker(delay=0.5, max_batch=2)
    site.wait_for_workers()
    file = data_set(tmp_path, prompts(10))
    words = ("run", str(file), "-m", "fake", "--run", "r1", "--dry-run")
    process = spawn(*words, "--redis", site.url, "--results", str(site.folder))
    wait_until(lambda: len(site.redis.keys("rq:job:*")) == 10)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, err
    assert "the jobs of the pilot are cancelled" in err
    assert "10, 0 done, 10 to run" in out
    names = [key.decode().removeprefix("rq:job:") for key in site.redis.keys("rq:job:*")]
    with Client(site.url) as client:
        jobs = [client.job(name) for name in names]
        wait_until(lambda: all(job.status().over for job in jobs))
    assert not site.redis.exists("rq:queue:chat:fake")
