"""The checks of `serve` before it takes a job, and its log."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from jobs import JobError
from jobs.embedded import EmbeddedRedis
from jobs.record.recorder import Recorder
from tests.worker.fake_backend import FakeBackend
from tests.worker.site import QUICK, Site, WorkerProcess
from worker import tasks
from worker.backend import Footprint
from worker.model_spec import ModelSpec
from worker.residency.policy import ResidencyPolicy
from worker.service import serve


def test_two_models_with_the_same_name_are_refused(site: Site) -> None:
    with pytest.raises(JobError, match="two models are called 'x': they would share a queue"):
        site.burst(models=["one/x", "other/x"])
    with pytest.raises(JobError, match="model 'fake' is given twice"):
        site.burst(models=["fake", "other", "fake"])


def test_models_under_a_budget_are_loaded_with_shares_of_it(site: Site) -> None:
    backend = FakeBackend(budget=256)
    specs = [ModelSpec(reference="one"), ModelSpec(reference="two", cache_bytes=12)]
    serve(backend, specs, redis_url=site.url, results=site.folder, burst=True, **QUICK)
    assert backend.resident == {"one": 120, "two": 112}


def test_pinned_models_that_do_not_fit_into_the_budget_are_refused_with_the_sum(site: Site) -> None:
    backend = FakeBackend(budget=2**20)
    backend.footprint = lambda spec: Footprint(  # type: ignore[method-assign]
        spec.reference, spec.reference, 2**19, 2**18, least_cache=0, most_cache=0
    )
    specs = [ModelSpec(reference=name) for name in ("one", "two")]
    with pytest.raises(JobError) as failure:
        serve(
            backend,
            specs,
            redis_url=site.url,
            results=site.folder,
            policies={name: ResidencyPolicy(pin=True) for name in ("one", "two")},
        )
    assert failure.value.message.splitlines() == [
        "the pinned models do not fit into --memory 1024 KiB:",
        "  one: 768 KiB (weights 512 KiB, estimated activations 256 KiB, cache 0 KiB)",
        "  two: 768 KiB (weights 512 KiB, estimated activations 256 KiB, cache 0 KiB)",
        "  together 1536 KiB: give more memory, or pin fewer",
    ]
    assert backend.loaded == []


@pytest.mark.parametrize(
    ("aliases", "message"),
    [
        ({"a": ("b",)}, "alias 'b' of a is also a name of b"),
        ({"b": ("a",)}, "alias 'a' of b is also a name of a"),
        ({"a": ("x",), "b": ("x",)}, "alias 'x' of b is also a name of a"),
    ],
)
def test_an_alias_that_is_a_name_of_another_model_is_refused(
    site: Site, aliases: dict[str, tuple[str, ...]], message: str
) -> None:
    specs = [ModelSpec(reference=name, aliases=aliases.get(name, ())) for name in ("a", "b")]
    with pytest.raises(JobError, match=message):
        serve(FakeBackend(), specs, redis_url=site.url, results=None, burst=True, **QUICK)


def test_jobs_may_name_a_model_by_its_alias(site: Site) -> None:
    job = site.submit(model="gpt")
    spec = ModelSpec(reference="fake", aliases=("gpt", "other"))
    serve(FakeBackend(), [spec], redis_url=site.url, results=None, burst=True, **QUICK)
    assert job.result().model == "gpt"


def test_a_model_that_cannot_be_loaded_ends_the_worker(site: Site) -> None:
    with pytest.raises(JobError) as failure:
        site.burst(models=["broken"])
    assert failure.value.code == "unsupported_model"
    assert not list(site.redis.scan_iter("rq:worker*"))


def test_an_unusable_results_folder_ends_the_worker(site: Site, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JobError, match="--results"):
        site.burst(results=tmp_path / "file")


def test_an_outage_when_the_recorder_starts_does_not_end_the_worker(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, start, failures = site.submit(run="r"), Recorder.start, [redis.ConnectionError("reset")]

    def fail_once(recorder: Recorder) -> None:
        if failures:
            raise failures.pop()
        start(recorder)

    monkeypatch.setattr(Recorder, "start", fail_once)
    site.burst()
    assert not failures
    site.assert_settled([job], "r")


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
