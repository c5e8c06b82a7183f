"""`--tensor-parallel`: what is refused before a process starts, and what `models check` says."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from tests.worker.checkpoints import make_checkpoint
from worker.demo import MODEL_DIR

WORK = "work -m demo --tensor-parallel 2"


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (f"{WORK} -m other", "can't be used with several models"),
        (
            f"{WORK} --upstream http://localhost:1/v1",
            "has no effect with --upstream, whose server has",
        ),
        (f"{WORK} --memory 50%", "can't be used with --memory"),
        (f"{WORK} --state-dir states", "can't be used with --state-dir"),
        (f"{WORK} --draft demo", "can't be used with --draft other than ngram: leave one"),
        (f"{WORK} --quantize q8", "can't be used with --quantize"),
        (f"{WORK} --devices cpu:0,cpu:0", "'cpu:0' is given twice"),
        (f"{WORK} --devices cpu:0", "2 ranks need 2 devices, one for each; 1 are given"),
        (f"{WORK} --devices cpu:0,cpu:1,cpu:2", "3 are given"),
        (f"{WORK} --devices cpu:0-1,cpu:2", "need the same number of cores each"),
        (f"{WORK} --devices cpu:0,cpu:9", "'cpu:9' needs core 9, which this process may not use"),
        (f"{WORK} --devices cpu:0,cuda:1", "can't be on a CPU and on GPUs"),
        ("work -m demo --tensor-parallel 0", "0 is not in the range x>=1"),
    ],
)
def test_what_can_not_be_is_refused_in_one_sentence(words: str, sentence: str, run: Run) -> None:
    done = run(*words.split())
    assert done.exit_code == 2
    assert sentence in " ".join(done.stderr.split())


@pytest.mark.parametrize("option", ["--config", "--prompt-cache"])
def test_a_config_and_prompt_caches_are_refused(option: str, run: Run, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text('[[models]]\nmodel = "demo"\n')
    done = run(*WORK.split(), option, str(file))
    assert done.exit_code == 2
    assert f"--tensor-parallel can't be used with {option}" in " ".join(done.stderr.split())


def test_check_says_what_would_happen(run: Run, tmp_path: Path) -> None:
    check = ("models", "check", "--device", "cpu", "--tensor-parallel")
    done = run(*check, "2", "demo")
    assert done.exit_code == 0
    said = "ranks       2, each with about 3.6 MiB of the weights and 1.5 MiB of the cache of 1,024"
    assert said in done.stdout
    assert json.loads(run(*check, "2", "demo", "--json").stdout)["tensor_parallel"] == 2
    heads: dict[str, Any] = {"linear_num_key_heads": 3, "linear_num_value_heads": 6}
    hybrid = run(*check, "2", str(make_checkpoint(tmp_path / "hybrid", "qwen3_5_text", **heads)))
    assert hybrid.exit_code == 2
    assert "its 3 recurrent key heads can't be divided by 2 ranks" in hybrid.stderr
    uneven = run(*check, "5", "demo")
    assert uneven.exit_code == 2
    assert "can't be divided by 5 ranks" in uneven.stderr


def test_files_whose_blocks_would_be_sliced_are_refused(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "demo.gguf"
    assert run("models", "quantize", str(MODEL_DIR), "-o", str(file)).exit_code == 0
    done = run("models", "check", "--device", "cpu", "--tensor-parallel", "2", str(file))
    assert done.exit_code == 2
    assert "it is a GGUF file, whose blocks would be sliced" in " ".join(done.stderr.split())
