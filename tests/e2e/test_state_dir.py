"""State in files through a real Redis and the commands of real workers."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from jobs.api.answer import ChatCompletion
from tests.cli.conftest import COMMAND
from tests.worker.checkpoints import make_checkpoint
from tests.worker.site import PATIENCE, Site
from worker.cache.state_file import StateFile

SYSTEM = "You answer questions about the weather. " * 8


def cached(completion: ChatCompletion) -> int:
    usage = completion.usage
    assert usage is not None and usage.prompt_tokens_details is not None
    return usage.prompt_tokens_details.cached_tokens


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "m", num_hidden_layers=1)


@contextmanager
def worker(site: Site, folder: Path, *words: str) -> Iterator[None]:
    """`chatjobs work` with options, stopped by SIGTERM."""
    served = ["--model", str(folder), "--redis", site.url, "--results", str(site.folder)]
    process = subprocess.Popen([str(COMMAND), "work", *served, *words, "--quiet"])
    try:
        yield
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=PATIENCE) == 0
    finally:
        process.kill()
        process.wait()


def test_a_restarted_worker_continues_a_session_with_its_state(
    site: Site, folder: Path, tmp_path: Path
) -> None:
    options = ["--state-dir", str(tmp_path / "states")]
    session = site.client.session(model="m", system=SYSTEM, max_tokens=4, temperature=0)
    with worker(site, folder, *options):
        assert cached(session.send("Rain?", timeout=PATIENCE)) == 0
    (file,) = (tmp_path / "states").iterdir()
    with worker(site, folder, *options):
        turn = session.send("Snow?", timeout=PATIENCE)
        assert turn.usage is not None and turn.usage.prompt_tokens - 32 < cached(turn)
    assert [*(tmp_path / "states").iterdir()] == [file]


def test_no_state_is_written_beyond_the_limit(site: Site, folder: Path, tmp_path: Path) -> None:
    session = site.client.session(model="m", system=SYSTEM, max_tokens=4)
    with worker(site, folder, "--state-dir", str(tmp_path / "states"), "--state-bytes", "1"):
        session.send("Rain?", timeout=PATIENCE)
    assert [*(tmp_path / "states").iterdir()] == []


def test_a_worker_begins_with_a_prompt_cache(site: Site, folder: Path, tmp_path: Path) -> None:
    file, text = tmp_path / "system.safetensors", tmp_path / "system.txt"
    text.write_text(SYSTEM)
    save = ["prompts", "save", "--model", str(folder), "--system", str(text), "-o", str(file)]
    subprocess.run([str(COMMAND), *save], check=True, timeout=PATIENCE, capture_output=True)
    count = len(StateFile.open(file).token_ids)
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Rain?"}]
    with worker(site, folder, "--prompt-cache", str(file)):
        for salt in ("a", "b", None):  # each is the first one of its salt
            request: Any = {"model": "m", "messages": messages, "max_tokens": 2, "cache_salt": salt}
            answer = site.client.submit(request).result(timeout=PATIENCE)
            assert answer.usage is not None
            assert 64 < count <= cached(answer) < answer.usage.prompt_tokens
