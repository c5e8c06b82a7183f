"""The Dockerfile and the compose files have the settings that the guarantees need.

Each test of the compose files runs twice: on the plain YAML, and on the output of
`docker-compose config`, which is skipped where docker-compose is not installed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from worker.kernels import build

ROOT = Path(__file__).parent.parent
BASE = ROOT / "docker-compose.yml"
GPU = ROOT / "docker-compose.gpu.yml"
SERVICES = {"redis", "worker", "dashboard"}
PINNED = re.compile(r".+:v?\d+\.\d+\.\d+(-[\w.-]+)?")


def merged(base: Any, over: Any) -> Any:
    """Compose's rule for the keys used here: mappings are merged, other values are replaced."""
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


@dataclass
class Stage:
    """One build stage of the Dockerfile: its base image or stage, and its instructions in order."""

    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def last(self, name: str) -> str | None:
        """Arguments of the last instruction `name`, as it is the one that counts."""
        return next((rest for word, rest in reversed(self.instructions) if word == name), None)


def stages(text: str) -> dict[str, Stage]:
    """The stages of a Dockerfile by name; an unnamed one is named by its number."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    found: dict[str, Stage] = {}
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        word, _, rest = line.strip().partition(" ")
        if word.upper() == "FROM":
            base, *name = [part for part in rest.split() if not part.startswith("--")]
            stage = Stage(base)
            found[name[1] if name else str(len(found))] = stage
        elif found:
            stage.instructions.append((word.upper(), rest.strip()))
    return found


DOCKERFILE = stages((ROOT / "Dockerfile").read_text())
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


def test_the_readme_says_how_rows_leave_the_volume() -> None:
    readme = (ROOT / "README.md").read_text()
    worker = as_yaml(BASE)["services"]["worker"]
    assert "results:/results" in worker["volumes"]
    assert "CHATJOBS_RESULTS=/results" in (DOCKERFILE["worker"].last("ENV") or "").split()
    assert "docker compose cp worker:/results ." in readme  # makes ./results of the examples
    assert "'results/default/samples/*.parquet'" in readme


@readers
def test_the_dashboard_needs_its_profile(read: Any) -> None:
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
def test_compose_images_are_pinned(read: Any) -> None:
    services = read(BASE)["services"]
    assert services.keys() == SERVICES
    for name, service in services.items():
        assert PINNED.fullmatch(service["image"]), name


@readers
def test_compose_builds_stages_of_the_dockerfile(read: Any) -> None:
    services = read(BASE)["services"]
    targets = {name: one["build"]["target"] for name, one in services.items() if "build" in one}
    assert targets == {"worker": "worker", "dashboard": "dashboard"}
    assert set(targets.values()) <= DOCKERFILE.keys()


def test_the_dockerfile_has_pinned_base_images() -> None:
    images = [stage.base for stage in DOCKERFILE.values() if stage.base not in DOCKERFILE]
    assert images
    for image in images:
        assert PINNED.fullmatch(image), image


@pytest.mark.parametrize("name", ["worker", "dashboard"])
def test_an_image_does_not_run_as_root(name: str) -> None:
    assert DOCKERFILE[name].last("USER") not in (None, "root", "0")


def test_the_worker_image_is_the_default_and_has_volumes_for_results_and_models() -> None:
    assert list(DOCKERFILE)[-1] == "worker"
    assert DOCKERFILE["worker"].last("VOLUME") == '["/results", "/models"]'
    assert DOCKERFILE["worker"].last("CMD") == '["work", "--model", "demo"]'


def test_the_worker_image_has_compiled_kernels() -> None:
    """Compiled in a stage with a compiler, and there before the package is installed."""
    compiling = " ".join(rest for _, rest in DOCKERFILE["kernels"].instructions)
    assert "g++" in compiling
    assert "python -m worker.kernels.build" in compiling
    words = [f"{word} {rest}" for word, rest in DOCKERFILE["worker"].instructions]
    folder = f"worker/kernels/{build.PREBUILT.name}"
    copied = words.index(f"COPY --from=kernels /app/{folder} {folder}")
    (installed,) = [i for i, one in enumerate(words) if "pip install" in one and "[worker," in one]
    assert words.index("COPY worker worker") < copied < installed


def test_the_worker_image_compiles_kernels_of_gpus_and_keeps_them() -> None:
    """Triton needs a C compiler; its cache is in a volume."""
    words = [f"{word} {rest}" for word, rest in DOCKERFILE["worker"].instructions]
    (compiler,) = (i for i, one in enumerate(words) if "install -y" in one)
    assert {"gcc", "libc6-dev"} <= set(words[compiler].split())
    assert "torch.version.cuda is None" in words[compiler]
    (torch,) = (i for i, one in enumerate(words) if one.endswith(" torch"))
    assert torch < compiler < words.index("USER chatjobs")
    environment = dict(one.split("=") for one in (DOCKERFILE["worker"].last("ENV") or "").split())
    volumes = DOCKERFILE["worker"].last("VOLUME") or ""
    assert f'"{Path(environment["TRITON_CACHE_DIR"]).parent}"' in volumes


def test_kernels_compile_without_the_rest_of_the_package(tmp_path: Path) -> None:
    """As in the image: with the standard library alone."""
    (tmp_path / "jobs").mkdir()
    for name in ("__init__.py", "disk.py"):
        shutil.copy(ROOT / "jobs" / name, tmp_path / "jobs")
    shutil.copytree(ROOT / "worker" / "kernels", tmp_path / "worker" / "kernels")
    shutil.copytree(ROOT / "worker" / "processes", tmp_path / "worker" / "processes")
    code = "from worker.kernels import build; print(build.PREBUILT)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == str(tmp_path / "worker" / "kernels" / "prebuilt"), done.stderr


def test_the_worker_image_asks_redis_for_its_health() -> None:
    command = (DOCKERFILE["worker"].last("HEALTHCHECK") or "").partition("CMD ")[2]
    assert "chatjobs status" in command
    assert "--host" in command


def test_the_dashboard_reads_jobs_as_json() -> None:
    assert DOCKERFILE["dashboard"].last("ENTRYPOINT") == '["rq-dashboard", "--json"]'


@pytest.mark.parametrize(
    ("text", "bases"),
    [
        ("", []),
        ("FROM python", ["python"]),
        ("FROM --platform=linux/amd64 a:1 AS x\nUSER u\n\nFROM x\n# FROM b", ["a:1", "x"]),
    ],
)
def test_every_from_line_starts_a_stage(text: str, bases: list[str]) -> None:
    assert [stage.base for stage in stages(text).values()] == bases
