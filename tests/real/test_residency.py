"""Both files in one worker whose memory has room for one of them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from jobs.store.worker_status import read_workers
from tests.cli.conftest import COMMAND
from tests.real.files import FOLDER, GEMMA, SMOLLM2
from tests.real.test_queue import PLAIN
from tests.worker.site import Site, wait_until

pytestmark = pytest.mark.real

CONFIG = """
memory = "{memory}"
max_wait = 2

[[models]]
model = "{smollm2}"
preload = false
context = 512
max_batch = 4

[[models]]
model = "{gemma}"
preload = false
context = 512
max_batch = 4
chat_template = "{template}"
"""


def test_two_real_models_take_turns_in_memory_for_one(redis_url: str, tmp_path: Path) -> None:
    files = {name: FOLDER / name for name in (SMOLLM2, GEMMA)}
    (template := tmp_path / "plain.jinja").write_text(PLAIN)
    (config := tmp_path / "worker.toml").write_text(
        CONFIG.format(
            memory="400MiB", smollm2=files[SMOLLM2], gemma=files[GEMMA], template=template
        )
    )
    site = Site(redis_url, tmp_path / "results")
    command = [str(COMMAND), "work", "--config", str(config), "--redis", redis_url]
    worker = subprocess.Popen([*command, "--results", str(tmp_path / "results")])
    try:
        names = [path.stem for path in files.values()]
        wait_until(lambda: any(read_workers(site.redis)))
        answers = [text for wave in range(2) for text in capitals(site, names, wave)]
        wait_until(lambda: read_workers(site.redis)[0]["evictions"] >= 2)
        (status,) = read_workers(site.redis)
    finally:
        worker.terminate()
        assert worker.wait(60) == 0
        site.close()
    # A model's answers are the same after it came back.
    assert len(set(answers[0::2])) == len(set(answers[1::2])) == 1
    assert all(re.search("Paris", answer) for answer in answers[:2])
    assert status["loads"] == status["evictions"] + 1


def capitals(site: Site, names: list[str], wave: int) -> list[str]:
    """The answers to twelve jobs, of each model in turn."""
    jobs = site.client.submit_many(
        {
            "model": names[number % 2],
            "messages": [
                {"role": "user", "content": "Question: What is the capital of France?\nAnswer:"}
            ],
            "temperature": 0,
            "max_tokens": 12,
            "job": {"run": "turns", "row": 12 * wave + number},
        }
        for number in range(12)
    )
    return [one.text for one in site.client.gather(jobs, timeout=600)]
