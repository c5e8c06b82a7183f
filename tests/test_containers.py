"""The compose files say what the guarantees need: checked as docker-compose reads them, where it is
installed, and as plain YAML anywhere."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
BASE = ROOT / "docker-compose.yml"
GPU = ROOT / "docker-compose.gpu.yml"
PINNED = re.compile(r".+:\d+\.\d+\.\d+(-[\w.-]+)?")


def merged(base: Any, over: Any) -> Any:
    """Compose's own rule for the parts used here: mappings merge, all else is replaced."""
    if isinstance(base, dict) and isinstance(over, dict):
        return {key: merged(base.get(key), over.get(key, base.get(key))) for key in base | over}
    return over


def as_yaml(*files: Path) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for file in files:
        config = merged(config, yaml.safe_load(file.read_text()))
    return config


def as_docker_compose(*files: Path) -> dict[str, Any]:
    if shutil.which("docker-compose") is None:
        pytest.skip("docker-compose is not installed")
    chosen = [part for file in files for part in ("-f", str(file))]
    done = subprocess.run(
        ["docker-compose", *chosen, "config"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    config = yaml.safe_load(done.stdout)
    assert isinstance(config, dict)
    return config


readers = pytest.mark.parametrize("read", [as_yaml, as_docker_compose])


@readers
def test_redis_keeps_jobs_on_disk_and_never_evicts_them(read: Any) -> None:
    redis = read(BASE)["services"]["redis"]
    options = " ".join(redis["command"])
    assert "--appendonly yes" in options
    assert "--maxmemory-policy noeviction" in options
    assert any(str(volume).startswith("redis:/data") for volume in redis["volumes"])
    assert redis["healthcheck"]["test"][-1] == "ping"


@readers
def test_the_worker_starts_after_redis_and_keeps_results_and_models(read: Any) -> None:
    config = read(BASE)
    worker = config["services"]["worker"]
    assert worker["depends_on"]["redis"]["condition"] == "service_healthy"
    targets = {str(volume).split(":")[1] for volume in worker["volumes"]}
    assert {"/results", "/models"} <= targets
    assert {"results", "models", "redis"} <= config["volumes"].keys()
    assert worker["command"][0] == "work"


@readers
def test_the_dashboard_is_there_only_when_asked_for(read: Any) -> None:
    services = read(BASE)["services"]
    assert services["dashboard"]["profiles"] == ["dashboard"]
    assert "profiles" not in services["redis"]
    assert "profiles" not in services["worker"]


@readers
def test_the_gpu_override_reserves_a_gpu_for_the_worker(read: Any) -> None:
    worker = read(BASE, GPU)["services"]["worker"]
    (device,) = worker["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia"
    assert device["capabilities"] == ["gpu"]
    assert "cuda" in worker["command"]


@readers
def test_images_are_pinned(read: Any) -> None:
    for name, service in read(BASE)["services"].items():
        assert PINNED.fullmatch(service["image"]), name


def test_the_dockerfile_is_pinned_runs_as_a_user_and_asks_redis_for_its_health() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert all(PINNED.fullmatch(image) for image in re.findall(r"^FROM (\S+:\S+)", text, re.M))
    last_user = re.findall(r"^USER (\S+)", text, re.M)[-1]
    assert last_user != "root"
    assert re.search(r"^HEALTHCHECK .*\\\n.*chatjobs status", text, re.M)
    assert "--json" in re.findall(r"^ENTRYPOINT \[(.*)\]", text, re.M)[0]  # the dashboard's
