"""Probes and metrics of running workers."""

from __future__ import annotations

import re
import signal
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jobs import JobError, keys
from jobs.store.operator import send
from tests.worker.fake_backend import FakeBackend
from tests.worker.site import ROOT, Site, WorkerProcess, wait_until
from worker.monitoring.readiness import Readiness
from worker.monitoring.server import HttpServer
from worker.queue.load_figures import LoadFigures

HERE = ("127.0.0.1", 0)


def get(worker: WorkerProcess, path: str) -> tuple[int, str]:
    wait_until(lambda: "probes and metrics" in worker.output, worker.output)
    found = re.search(r"http://(\S+)/metrics", worker.output)
    assert found is not None
    try:
        with urllib.request.urlopen(f"http://{found[1]}{path}", timeout=20) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def metrics(worker: WorkerProcess) -> dict[str, dict[tuple[str, ...], float]]:
    """The value of each sample by its labels, in the order of their names, by name."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(get(worker, "/metrics")[1]):
        found.setdefault(family.name, {})
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


def test_probes_say_why_a_worker_claims_no_jobs(site: Site, tmp_path: Path) -> None:
    load_until = tmp_path / "loaded"
    worker = site.worker(http=HERE, lease_seconds=30.0, load_until=str(load_until), grace=60.0)
    assert get(worker, "/healthz") == (200, "ok\n")
    assert get(worker, "/readyz") == (503, "starting: the models are being loaded\n")
    assert "process_resident_memory_bytes" in metrics(worker)
    load_until.touch()
    wait_until(lambda: get(worker, "/readyz") == (200, "ok\n"))

    (name,) = (one.decode() for one in site.redis.zrange(keys.WORKERS, 0, -1))
    send(site.redis, name, "pause", {}).result()
    assert get(worker, "/readyz") == (503, "claims no jobs: paused by an operator\n")
    send(site.redis, name, "resume", {}).result()
    assert get(worker, "/readyz") == (200, "ok\n")

    running = site.submit("a", words=100_000)
    wait_until(lambda: running.status().value == "started")
    with site.paused_server():
        wait_until(lambda: get(worker, "/readyz")[0] == 503)
        assert get(worker, "/readyz")[1].startswith(("Redis fails", "the loop has been waiting"))
        assert get(worker, "/healthz")[0] == 200
        wait_until(lambda: metrics(worker)["chatjobs_redis_up"] == {(): 0})
    wait_until(lambda: get(worker, "/readyz")[0] == 200)

    site.folder.rename(tmp_path / "moved")
    site.submit("b", run="r").result(timeout=60)
    wait_until(lambda: "can't write rows: " in get(worker, "/readyz")[1])
    (tmp_path / "moved").rename(site.folder)

    worker.send(signal.SIGTERM)
    wait_until(lambda: get(worker, "/readyz") == (503, "stopping: claims no more jobs\n"))
    assert get(worker, "/healthz")[0] == 200
    running.cancel()
    assert worker.wait() == 0


def test_metrics_are_the_figures_of_the_jobs_and_are_documented(site: Site) -> None:
    site.submit_many(["a", "b"], words=5, run="r")
    site.submit("c", fail="internal", retries=1, words=3)
    site.submit("d", refuse=True)
    site.submit("e", model="other", priority="bulk")
    site.redis.sadd(keys.OUTBOXES, "no folder")  # no recorder writes these rows
    site.redis.xadd(keys.outbox("no folder"), {"entry": "x"})
    worker = site.worker(http=HERE, lease_seconds=30.0, part_seconds=3600.0, max_batch=1)
    wait_until(lambda: sum(metrics(worker).get("chatjobs_job_errors_total", {}).values()) == 2)
    found = metrics(worker)
    assert found["chatjobs_request_success_total"] == {("stop", "fake"): 2}
    assert found["chatjobs_job_errors_total"] == {
        ("internal", "fake"): 1,
        ("context_length_exceeded", "fake"): 1,
    }
    assert found["chatjobs_job_retries_total"] == {("internal", "fake"): 1}
    for name in ("chatjobs_request_queue_time_seconds", "chatjobs_time_to_first_token_seconds"):
        assert found[f"{name}_count"] == {("fake",): 3}
    per_token = "chatjobs_request_time_per_output_token_seconds"
    assert found[f"{per_token}_count"] == {("fake",): 2}
    assert found[f"{per_token}_sum"]["fake",] >= 0.001
    buckets = list(found[f"{per_token}_bucket"].values())
    assert buckets == sorted(buckets) and buckets[-1] == 2
    assert found["chatjobs_queue_jobs"]["other", "bulk", "queued"] == 1
    assert found["chatjobs_queue_oldest_seconds"]["other", "bulk"] > 0
    assert (
        found["chatjobs_outbox_rows"][()] >= 1 and found["chatjobs_outbox_oldest_seconds"][()] > 0
    )
    assert found["chatjobs_generation_tokens_total"][()] >= 12
    assert found["chatjobs_ready"] == {(): 1}
    assert found["chatjobs_model_served"] == {("fake",): 1}

    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    page, of_gateway = page.split("\n## Of a gateway\n")
    page += of_gateway.partition("\n## ")[2]
    rows = re.findall(r"^\| `(chatjobs_\w+)` (.*)", page, re.MULTILINE)
    documented = {name for name, meaning in rows if "with `--host-memory`:" not in meaning}
    families = text_string_to_metric_families(get(worker, "/metrics")[1])
    exposed = {
        f"{one.name}_total" if one.type == "counter" else one.name
        for one in families
        if one.name.startswith("chatjobs_")
    }
    assert documented == exposed
    samples = {name for name in found if not name.endswith("_created")}
    for file in sorted((ROOT / "deploy").rglob("*.*")):
        used = set(re.findall(r"\b(?:chatjobs|process)_\w+", file.read_text(encoding="utf-8")))
        assert used - samples <= {"process_resident_memory_bytes"}, file


class Anything:
    """A collaborator whose attributes are given."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, ""),
        ({"sick": "jobs fail: no device"}, "claims no jobs: jobs fail: no device"),
        ({"seconds": 7.2}, "the loop has been waiting for 7 s: for Redis, or for a slow start"),
        ({"overdue": "loading m takes 90 s"}, "loading m takes 90 s"),
        ({"error": "disk full"}, "can't write rows: disk full"),
    ],
)
def test_each_reason_for_not_being_ready_is_said(changed: dict[str, Any], reason: str) -> None:
    state = {"sick": "", "seconds": 0.0, "overdue": "", "error": "", **changed}
    loop: Any = Anything(stop_at=None, serves=True, redis_fails=False)
    claimer: Any = Anything(sick=state["sick"], pause="")
    watchdog: Any = Anything(round_seconds=lambda now: state["seconds"])
    readiness = Readiness(
        loop,
        claimer,
        watchdog,
        lambda: {"path": "/r", "error": state["error"]},
        lambda: LoadFigures(overdue=state["overdue"]),
    )
    assert readiness.obstacle == reason


def test_a_worker_whose_port_is_taken_does_not_start(site: Site) -> None:
    server = HttpServer(*HERE, {})
    host, _, port = server.address.partition(":")
    backend = FakeBackend()
    with pytest.raises(
        JobError, match=r"can't listen on 127\.0\.0\.1:[0-9]+: Address already in use"
    ):
        site.burst(backend, http=(host, int(port)))
    server.close()
    assert site.redis.keys("*") == []
