"""The manifests name commands, ports, pages and keys that exist, and their time limits fit."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from typing import Any

import pytest
import redis
import yaml

from jobs import keys
from jobs.record.process import STOP_SECONDS
from jobs.store.connection.connect import URL_VARIABLE
from tests.deploy.command_line import DEPLOY, ROOT, config_of, options_of
from tests.worker.site import Site, wait_until
from worker.monitoring.pages import pages_of
from worker.monitoring.redis_figures import RedisFigures

FOLDER = DEPLOY / "kubernetes"
MODEL = "Qwen/Qwen3-0.6B"


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((FOLDER / name).read_text("utf-8")))


def deployment(name: str) -> dict[str, Any]:
    (found,) = (one for one in documents(name) if one["kind"] == "Deployment")
    return dict(found)


def pod(name: str) -> dict[str, Any]:
    return dict(deployment(name)["spec"]["template"]["spec"])


def container(name: str) -> dict[str, Any]:
    (found,) = pod(name)["containers"]
    return dict(found)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.name)
def test_each_object_has_a_kind_and_a_name(path: Any) -> None:
    objects = documents(path.name)
    assert objects
    for one in objects:
        assert {"apiVersion", "kind"} <= one.keys()
        assert one["kind"] == "Kustomization" or one["metadata"]["name"]


def test_the_kustomization_has_the_files_that_need_no_password_and_no_keda() -> None:
    (found,) = documents("kustomization.yaml")
    assert found["resources"] == ["worker.yaml", "recorder.yaml"]
    (generated,) = found["configMapGenerator"]
    (volume,) = (one for one in pod("worker.yaml")["volumes"] if "configMap" in one)
    assert generated == {"name": volume["configMap"]["name"], "files": ["worker.toml"]}
    (image,) = found["images"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert image["newTag"] == project["version"]
    for name in ("worker.yaml", "recorder.yaml"):
        assert container(name)["image"] == image["name"]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
def test_kubectl_builds_the_kustomization() -> None:
    done = subprocess.run(["kubectl", "kustomize", FOLDER], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kinds = sorted(one["kind"] for one in yaml.safe_load_all(done.stdout))
    assert kinds == ["ConfigMap", "Deployment", "Deployment", "PersistentVolumeClaim"]


def test_a_worker_is_killed_after_its_grace_and_serves_the_file_of_the_config_map() -> None:
    found = container("worker.yaml")
    (mounted,) = (one for one in found["volumeMounts"] if one["name"] == "config")
    config = f"{mounted['mountPath']}/worker.toml"
    options = options_of(found["args"], {config: FOLDER / "worker.toml"})
    assert options["command"] == "work" and options["no_record"]
    assert pod("worker.yaml")["terminationGracePeriodSeconds"] > options["grace"] + 3 + 20
    assert [one.model for one in config_of(FOLDER / "worker.toml").models] == [MODEL]


def test_probes_and_scrapes_ask_pages_that_a_worker_answers_on_its_port() -> None:
    found = container("worker.yaml")
    words = found["args"]
    host, port = options_of([*words[:2], "-m", "demo", *words[4:]])["http"]
    assert host == "0.0.0.0"  # probes come from outside of the container
    (opened,) = found["ports"]
    assert opened["containerPort"] == port
    pages = pages_of(None, RedisFigures("redis://127.0.0.1:1/0")).keys()
    asked = {}
    for name in ("startupProbe", "livenessProbe", "readinessProbe"):
        request = found[name]["httpGet"]
        assert request["port"] in (opened["name"], port)
        asked[name] = request["path"]
    assert set(asked.values()) <= pages
    # Models load for minutes, in which only /healthz says that all is well.
    assert asked["startupProbe"] == asked["livenessProbe"] == "/healthz"
    assert asked["readinessProbe"] == "/readyz"
    notes = deployment("worker.yaml")["spec"]["template"]["metadata"]["annotations"]
    assert notes["prometheus.io/port"] == str(port) and notes["prometheus.io/path"] in pages


def test_the_recorder_alone_writes_to_the_volume_and_has_time_for_the_rows_in_redis() -> None:
    found = container("recorder.yaml")
    options = options_of(found["args"])
    assert options["command"] == "record"
    (mounted,) = found["volumeMounts"]
    assert mounted["mountPath"] == options["results"]
    (volume,) = pod("recorder.yaml")["volumes"]
    (claim,) = (one for one in documents("recorder.yaml") if "Claim" in one["kind"])
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert deployment("recorder.yaml")["spec"]["strategy"] == {"type": "Recreate"}
    assert pod("recorder.yaml")["terminationGracePeriodSeconds"] > STOP_SECONDS + 3


def test_the_url_of_redis_comes_from_the_secret() -> None:
    (secret,) = documents("secret.yaml")
    for name in ("worker.yaml", "recorder.yaml"):
        (variable,) = container(name)["env"]
        assert variable["name"] == URL_VARIABLE
        source = variable["valueFrom"]["secretKeyRef"]
        assert source["name"] == secret["metadata"]["name"]
        assert secret["stringData"][source["key"]].startswith("redis://worker:")
    (authentication, _) = documents("keda.yaml")
    for one in authentication["spec"]["secretTargetRef"]:
        assert one["name"] == secret["metadata"]["name"] and one["key"] in secret["stringData"]


def test_keda_scales_the_workers_and_counts_jobs_that_run_as_a_worker_does() -> None:
    (_, scaled) = documents("keda.yaml")
    spec = scaled["spec"]
    assert spec["scaleTargetRef"]["name"] == deployment("worker.yaml")["metadata"]["name"]
    (model,) = config_of(FOLDER / "worker.toml").models
    running = [
        one["metadata"] for one in spec["triggers"] if ":wip:" in one["metadata"]["listName"]
    ]
    assert {one["listLength"] for one in running} == {str(model.max_batch)}
    assert all(one["type"] == "redis" for one in spec["triggers"])


def lengths(client: redis.Redis) -> dict[str, int]:
    """What KEDA reads for each trigger: it asks for the type of the key in a script, and for the
    length that this type has."""
    script = """
    local commands = {list = 'LLEN', zset = 'ZCARD', none = 'LLEN'}
    return redis.call(commands[redis.call('TYPE', KEYS[1])['ok']], KEYS[1])
    """
    (_, scaled) = documents("keda.yaml")
    names = [one["metadata"]["listName"] for one in scaled["spec"]["triggers"]]
    found: dict[str, Any] = {name: client.eval(script, 1, name) for name in names}
    return {name: int(length) for name, length in found.items() if length}


def test_keda_sees_jobs_of_all_kinds_with_the_rights_that_the_guide_gives_it(site: Site) -> None:
    page = (ROOT / "docs/operations/kubernetes.md").read_text("utf-8")
    (rights,) = re.findall(r"^ +ACL SETUSER keda on >\S+ (.+)$", page, re.MULTILINE)
    assert "setinfo" not in rights  # Redis 7.0 does not know it, and refuses the whole line
    site.redis.execute_command("ACL", "SETUSER", "keda", "reset", "on", ">secret", *rights.split())
    try:
        keda = redis.Redis.from_url(site.url, username="keda", password="secret")
        assert keda.ping() and not lengths(keda)
        site.submit(model=MODEL)
        site.submit_many(["b", "c"], model=MODEL, priority="bulk")
        site.submit(model=MODEL, tenant="acme")
        site.submit(model=MODEL, tenant="other", priority="bulk")
        chat, bulk = (keys.queue(MODEL, one) for one in ("interactive", "bulk"))
        waiting = {f"rq:queue:{chat}": 1, f"rq:queue:{bulk}": 2}
        assert lengths(keda) == {**waiting, keys.tenants(chat): 1, keys.tenants(bulk): 1}
        scheduled = site.submit(model=MODEL, delay=86_400)  # no worker runs until it is queued
        assert lengths(keda)[f"rq:scheduled:{chat}"] == 1
        scheduled.cancel()
        running = site.submit(model="Qwen/Qwen3-0.6B", words=100_000, id="runs")
        with pytest.raises(redis.exceptions.NoPermissionError):
            keda.hgetall(f"rq:job:{running.id}")
        site.worker(models=[MODEL], max_batch=8)
        wait_until(lambda: lengths(keda) == {f"rq:wip:{chat}": 1})
        running.cancel()
        wait_until(lambda: not lengths(keda))
        keda.close()
    finally:
        site.redis.execute_command("ACL", "DELUSER", "keda")
