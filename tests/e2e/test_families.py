"""One worker serves a checkpoint of each family, as save_pretrained writes it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from jobs import Client
from jobs.embedded import EmbeddedRedis
from tests.worker.checkpoints import FAMILIES, WRAPPED, make_checkpoint
from tests.worker.site import PATIENCE

COMMAND = Path(sys.executable).with_name("chatjobs")
CHAT = ("chat", "Hello!", "--json", "--wait", str(PATIENCE), "-o", "max_tokens=12", "-o", "seed=1")


def test_one_worker_serves_all_families(tmp_path: Path) -> None:
    names = (*FAMILIES, *WRAPPED)
    folders = [make_checkpoint(tmp_path / name, name, dtype="bfloat16") for name in names]
    with EmbeddedRedis() as redis, Client(redis.url) as client:
        options = ("--redis", redis.url)
        models = [part for folder in folders for part in ("--model", str(folder))]
        worker = subprocess.Popen(
            [COMMAND, "work", *models, *options, "--results", tmp_path / "results", "-q"]
        )
        try:
            for name in names:
                reply = subprocess.run(
                    [COMMAND, *CHAT, "--model", name, *options],
                    capture_output=True,
                    text=True,
                    timeout=2 * PATIENCE,
                )
                assert reply.returncode == 0, reply.stderr
                completion = json.loads(reply.stdout.splitlines()[-1])
                assert completion["model"] == name
                assert 0 < completion["usage"]["completion_tokens"] <= 12
                by_folder = client.submit(
                    {
                        "model": str(tmp_path / name),
                        "messages": [{"role": "user", "content": "Hello!"}],
                        "max_tokens": 2,
                    }
                )
                assert by_folder.result(timeout=PATIENCE).model == str(tmp_path / name)
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
