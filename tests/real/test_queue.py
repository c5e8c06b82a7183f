"""Both files through a real Redis and a worker process, to Parquet."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from jobs.store.worker_status import read_workers
from tests.cli.conftest import COMMAND
from tests.real.conftest import Real
from tests.worker.site import Site, wait_until

pytestmark = pytest.mark.real

# Gemma 3 270M is a base model: its file has no chat template.
PLAIN = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def test_answers_of_a_real_model_reach_parquet(real: Real, redis_url: str, tmp_path: Path) -> None:
    template = tmp_path / "plain.jinja"
    template.write_text(PLAIN)
    words = ["--chat-template", str(template)] if "gemma" in real.path.name else []
    results = tmp_path / "results"
    command = [str(COMMAND), "work", "--model", str(real.path), "--redis", redis_url, *words]
    worker = subprocess.Popen([*command, "--results", str(results)])
    site = Site(redis_url, results)
    try:
        name = real.path.stem
        wait_until(lambda: any(name in one["names"] for one in read_workers(site.redis)))
        jobs = site.client.submit_many(
            {
                "model": name,
                "messages": [
                    {
                        "role": "user",
                        "content": f"Question: What is the capital of {country}?\nAnswer:",
                    }
                ],
                "temperature": 0,
                "max_tokens": 12,
                "job": {"run": "capitals", "row": row},
            }
            for row, country in enumerate(("France", "Italy", "Spain", "Japan"))
        )
        answers = [completion.text for completion in site.client.gather(jobs, timeout=120)]
        site.client.wait_for_rows(jobs, timeout=60)
    finally:
        worker.terminate()
        assert worker.wait(60) == 0
        site.close()
    rows = site.results.table(run="capitals").sort_by("row_index").to_pylist()
    assert [row["text"] for row in rows] == answers
    assert "Paris" in answers[0]
