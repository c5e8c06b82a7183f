"""Prompts that begin alike through a real Redis and a real worker: results, rows and `status`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from jobs import Client
from jobs.api.answer import ChatCompletion
from tests.cli.conftest import COMMAND
from tests.worker.checkpoints import make_checkpoint
from tests.worker.site import PATIENCE, Site, wait_until

SYSTEM = {"role": "system", "content": "You answer questions about the weather. " * 8}


def ask(client: Client, text: str, **fields: Any) -> tuple[Any, ChatCompletion]:
    messages = [SYSTEM, {"role": "user", "content": text}]
    request: Any = {"model": "m", "messages": messages, "max_tokens": 4, "temperature": 0, **fields}
    job = client.submit(request)
    return job, job.result(timeout=PATIENCE)


def cached(completion: ChatCompletion) -> int:
    usage = completion.usage
    assert usage is not None and usage.prompt_tokens_details is not None
    return usage.prompt_tokens_details.cached_tokens


def test_cached_tokens_reach_results_rows_and_status(site: Site, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "m", num_hidden_layers=1)
    worker = site.worker(real=True, models=[str(folder)])
    first, cold = ask(site.client, "Rain?")
    second, warm = ask(site.client, "Snow?")
    other, salted = ask(site.client, "Snow?", cache_salt="tenant")
    assert cached(cold) == cached(salted) == 0
    assert warm.usage is not None and 50 < cached(warm) < warm.usage.prompt_tokens
    total = sum(one.usage.prompt_tokens for one in (cold, warm, salted) if one.usage)

    def status(*words: str) -> str:
        words = (str(COMMAND), "status", *words, "--redis", site.url)
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout

    def figures() -> list[tuple[int, int]]:
        workers = json.loads(status("--json"))["workers"]
        return [(one["prompt_tokens"], one["cached_tokens"]) for one in workers]

    wait_until(lambda: figures() == [(total, cached(warm))])
    wait_until(lambda: f"{100 * cached(warm) / total:.0f} %" in status())
    assert worker.stop() == 0
    rows = [site.row(job) for job in (first, second, other)]
    assert [row["cached_tokens"] for row in rows] == [0, cached(warm), 0]
    assert rows[1]["request_hash"] == rows[2]["request_hash"]


def test_a_worker_with_the_cache_off_computes_every_prompt(site: Site, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "m", num_hidden_layers=1)
    jobs = [site.submit("the same words " * 20, model="m", max_tokens=2) for _ in range(2)]
    words = ["work", "--model", str(folder), "--redis", site.url, "--results", str(site.folder)]
    subprocess.run(
        [COMMAND, *words, "--prefix-cache", "off", "--burst"], check=True, timeout=PATIENCE
    )
    assert [site.row(job)["cached_tokens"] for job in jobs] == [0, 0]
