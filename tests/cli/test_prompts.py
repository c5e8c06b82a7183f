"""`chatjobs prompts save` and the options of `work` that take state from files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.cli.test_json import documented
from tests.worker.checkpoints import make_checkpoint
from worker.cache.state_file import StateFile
from worker.cli.prompts import prompts
from worker.cli.work import work


@pytest.fixture
def system(tmp_path: Path) -> Path:
    file = tmp_path / "system.txt"
    file.write_text("You answer questions about the weather. " * 4)
    return file


def test_save_writes_a_prompt_cache(tmp_path: Path, system: Path) -> None:
    folder = make_checkpoint(tmp_path / "m", num_hidden_layers=1)
    output = tmp_path / "system.safetensors"
    words = ["save", "--model", str(folder), "--system", str(system), "-o", str(output)]
    done = CliRunner().invoke(prompts, [*words, "--json"])
    assert done.exit_code == 0, done.output
    (found,) = map(json.loads, done.stdout.splitlines())
    count = len(StateFile.open(output).token_ids)
    size = output.stat().st_size
    assert set(found) == documented("prompts save")
    assert found == {"model": "m", "file": str(output), "tokens": count, "bytes": size}
    again = CliRunner().invoke(prompts, words)
    assert again.exit_code == 2 and "--force" in again.output
    short = tmp_path / "short.txt"
    short.write_bytes(b"\xff")
    words[4] = str(short)
    refused = CliRunner().invoke(prompts, [*words, "--force"])
    assert refused.exit_code == 2 and "is not UTF-8 text" in refused.output


@pytest.mark.parametrize("option", ["--prompt-cache", "--state-dir"])
def test_state_from_files_needs_the_prefix_cache(option: str, tmp_path: Path, system: Path) -> None:
    value = str(system if option == "--prompt-cache" else tmp_path)
    words = ["--model", "demo", option, value, "--prefix-cache", "off"]
    done = CliRunner().invoke(work, words)
    assert done.exit_code == 2 and f"{option} needs --prefix-cache on" in done.output


def test_a_prompt_cache_is_for_one_model(system: Path) -> None:
    words = ["--model", "demo", "--model", "other", "--prompt-cache", str(system)]
    done = CliRunner().invoke(work, words)
    assert done.exit_code == 2 and "start a worker for each" in done.output
