"""The checks of `serve` before it takes a job, and its log."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from jobs import JobError
from jobs.embedded import EmbeddedRedis
from tests.worker.site import Site, WorkerProcess
from worker import tasks


def test_two_models_with_the_same_name_are_refused(site: Site) -> None:
    with pytest.raises(JobError, match="two models are called 'x': they would share a queue"):
        site.burst(models=["one/x", "other/x"])
    with pytest.raises(JobError, match="model 'fake' is given twice"):
        site.burst(models=["fake", "other", "fake"])


def test_a_model_that_cannot_be_loaded_ends_the_worker(site: Site) -> None:
    with pytest.raises(JobError) as failure:
        site.burst(models=["broken"])
    assert failure.value.code == "unsupported_model"
    assert not list(site.redis.scan_iter("rq:worker*"))


def test_an_unusable_results_folder_ends_the_worker(site: Site, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JobError, match="--results"):
        site.burst(results=tmp_path / "file")


def test_a_redis_that_evicts_keys_is_refused(site: Site) -> None:
    with (
        site.settings(**{"maxmemory": "100mb", "maxmemory-policy": "allkeys-lru"}),
        pytest.raises(JobError, match="noeviction"),
    ):
        site.burst()
    with site.settings(**{"maxmemory-policy": "allkeys-lru"}):  # without a limit, it evicts nothing
        site.burst()


def test_the_password_is_never_logged(site: Site) -> None:
    with EmbeddedRedis(port=0) as server:
        client = redis.Redis.from_url(server.url)
        client.config_set("requirepass", "hunter2")
        url = server.tcp_url.replace("redis://", "redis://:hunter2@")
        worker = WorkerProcess(url, site.folder, burst=True)
        assert worker.wait() == 0
        wrong = WorkerProcess(url.replace("hunter2", "hunter3"), site.folder)
        assert wrong.wait() == 3
        assert "refused the login" in wrong.output
        assert "hunter" not in worker.output + wrong.output


@pytest.mark.parametrize("task", [tasks.chat_completion, tasks.score])
def test_calling_a_task_function_is_an_error(task: Callable[[dict[str, Any]], Any]) -> None:
    with pytest.raises(JobError, match="chatjobs work --model m"):
        task({"model": "m"})
