"""One worker serves a checkpoint of each family, as save_pretrained writes it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from jobs import Client
from jobs.embedded import EmbeddedRedis
from tests.worker.checkpoints import FAMILIES, WRAPPED, make_checkpoint
from tests.worker.site import PATIENCE

COMMAND = Path(sys.executable).with_name("chatjobs")


def test_one_worker_serves_all_families(tmp_path: Path) -> None:
    names = (*FAMILIES, *WRAPPED)
    folders = [make_checkpoint(tmp_path / name, name, dtype="bfloat16") for name in names]
    with EmbeddedRedis() as redis, Client(redis.url) as client:
        models = [part for folder in folders for part in ("--model", str(folder))]
        options = ("--redis", redis.url, "--results", tmp_path / "results", "-q")
        worker = subprocess.Popen([COMMAND, "work", *models, *options])
        try:
            for name in names:
                for model in (name, str(tmp_path / name)):
                    job = client.submit(
                        {
                            "model": model,
                            "messages": [{"role": "user", "content": "Hello!"}],
                            "max_tokens": 6,
                            "seed": 1,
                        }
                    )
                    completion = job.result(timeout=PATIENCE)
                    assert completion.model == model
                    assert completion.usage is not None
                    assert 0 < completion.usage.completion_tokens <= 6
            # Jobs of all models at once: the engine thread steps the models in turn.
            jobs = client.submit_many(
                {
                    "model": name,
                    "messages": [{"role": "user", "content": f"Hello, {name}!"}],
                    "max_tokens": 8,
                }
                for name in names * 3
            )
            for job, name in zip(jobs, names * 3, strict=True):
                assert job.result(timeout=PATIENCE).model == name
        finally:
            worker.terminate()
            assert worker.wait(timeout=PATIENCE) == 0
