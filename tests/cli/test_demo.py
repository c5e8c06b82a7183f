"""`chatjobs demo` writes one row per job and a correct answer, even if its worker is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from jobs import Client, Results
from tests.cli.conftest import Run, Spawn
from tests.cli.test_json import documented
from tests.waiting import PATIENCE, wait_until


def test_the_demo_replaces_a_killed_worker(
    spawn: Spawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 120
    with tempfile.TemporaryDirectory(prefix="t-") as short:  # than the limit of a socket's path
        monkeypatch.setenv("TMPDIR", short)
        demo = spawn("demo", "--rows", str(count), "--run", "r1", "--results", str(tmp_path))
        assert demo.stderr is not None
        worker = 0
        for line in demo.stderr:
            if found := re.match(r"worker: process (\d+)", line):
                worker = int(found[1])
            if " serves demo" in line:
                break
        (socket,) = Path(short).glob("chatjobs-*/redis.sock")
        with Client(f"unix://{socket}") as client:
            wait_until(lambda: client.redis.zcard("rq:wip:bulk:demo"))  # jobs are running
            os.kill(worker, signal.SIGKILL)
        out, err = demo.communicate(timeout=2 * PATIENCE)
    assert demo.returncode == 0, err
    assert "SIGKILL" in err
    rows = Results(tmp_path).table("r1").to_pylist()
    assert Counter(row["row_index"] for row in rows) == Counter(range(count))
    assert {row["status"] for row in rows} == {"ok"}
    assert {json.loads(row["metadata"])["task"] for row in rows} > {"addition"}
    assert out.startswith(f"r1: {count} in, {count} rows, 0 missing, 0 twice, 0 failed\n")
    scores = pq.read_table(tmp_path / "r1/scores")
    right = sum(scores["value"].to_pylist())
    assert set(scores["metric"].to_pylist()) == {"exact"}
    assert right == sum(row["text"].strip() == row["target"] for row in rows) >= 0.85 * count
    assert re.search(rf"^all +{count} +{right:.0f} +0\.", out, re.M)
    assert Results(tmp_path).config("r1")["configuration"]["options"] == {"temperature": 0}
    assert re.search(r"tokens/s$", out, re.M)
    assert re.search(r"^draft: [\d,]+ of [\d,]+ tokens accepted$", out, re.M)
    assert str(tmp_path / "r1") in out
    assert out.endswith("> What is 17 + 25?\n42\n")


def test_an_existing_run_is_refused(run: Run, finished_run: Path) -> None:
    result = run("demo", "--run", "r1", "--results", str(finished_run))
    assert result.exit_code == 2
    assert Results(finished_run).table("r1").num_rows == 3


def test_the_model_can_be_quantised_first(spawn: Spawn, tmp_path: Path) -> None:
    words = ("--model", "demo:q8_0", "--rows", "20", "--run", "r", "--results", str(tmp_path))
    demo = spawn("demo", *words, "--json")
    out, err = demo.communicate(timeout=2 * PATIENCE)
    assert demo.returncode == 0, err
    assert "demo-Q8_0.gguf: 8.6 bits per weight" in err
    assert "serves demo-Q8_0 on" in err
    assert "warning" not in err
    found = json.loads(out)
    assert set(found) == documented("demo")
    assert (found["run"], found["rows"], found["samples"]) == ("r", 20, str(tmp_path / "r/samples"))
    assert found["audit"]["rows"] == 20
    assert sum(task["rows"] for task in found["tasks"].values()) == 20


def test_an_unknown_kind_is_refused(run: Run) -> None:
    result = run("demo", "--model", "demo:Q9")
    assert result.exit_code == 2
    assert "give demo, or demo: and one of Q8_0," in result.stderr
