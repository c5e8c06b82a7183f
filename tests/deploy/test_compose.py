"""The override of the compose file for a host of one's own."""

from __future__ import annotations

import re
from typing import Any

from tests.deploy.command_line import DEPLOY, ROOT, options_of
from tests.test_containers import BASE, PINNED, readers

HOST = DEPLOY / "compose/host.yml"
UPSTREAM = DEPLOY / "compose/vllm.yml"


def mounts(volumes: list[Any]) -> dict[str, str]:
    """What a container sees at each path; docker-compose writes mounts as mappings."""
    found = {}
    for one in volumes:
        if isinstance(one, dict):
            found[one["target"]] = one["source"]
        else:
            source, target, *_ = re.sub(r"\$\{\w+:-([^}]+)\}", r"\1", one).split(":")
            found[target] = source
    return found


@readers
def test_rows_go_to_a_folder_of_the_host_and_models_stay_in_their_volume(read: Any) -> None:
    worker = read(BASE, HOST)["services"]["worker"]
    found = mounts(worker["volumes"])
    assert found["/results"] in ("./results", str(ROOT / "results"))
    assert found["/models"] == "models"


@readers
def test_the_worker_serves_the_mounted_file_and_opens_its_pages_to_this_host_alone(
    read: Any,
) -> None:
    worker = read(BASE, HOST)["services"]["worker"]
    config = "/etc/chatjobs/worker.toml"
    file = (ROOT / mounts(worker["volumes"])[config]).resolve()
    options = options_of(worker["command"], {config: file})
    assert options["command"] == "work" and options["config"] == DEPLOY / "worker.toml"
    (port,) = worker["ports"]
    if isinstance(port, dict):
        port = f"{port['host_ip']}:{port['published']}:{port['target']}"
    assert port == f"127.0.0.1:9100:{options['http'][1]}"
    assert options["http"][0] == "0.0.0.0"


@readers
def test_the_worker_has_more_time_to_stop_than_its_jobs_get(read: Any) -> None:
    worker = read(BASE, HOST)["services"]["worker"]
    file = {"/etc/chatjobs/worker.toml": DEPLOY / "worker.toml"}
    grace = options_of(worker["command"], file)["grace"]
    seconds = re.fullmatch(r"(?:(\d+)m)?(?:(\d+)s)?", worker["stop_grace_period"])
    assert seconds is not None
    minutes, rest = (int(part or 0) for part in seconds.groups())
    assert 60 * minutes + rest > grace + 3 + 20


@readers
def test_redis_keeps_its_data_and_reads_the_shipped_settings(read: Any) -> None:
    service = read(BASE, HOST)["services"]["redis"]
    found = mounts(service["volumes"])
    assert found["/data"] == "redis"
    program, path = service["command"]
    assert program == "redis-server"
    assert (ROOT / found[path]).resolve() == DEPLOY / "redis/chatjobs.conf"


@readers
def test_the_worker_sends_its_jobs_to_the_engine_beside_it(read: Any) -> None:
    services = read(BASE, UPSTREAM)["services"]
    options = options_of(
        [re.sub(r"\$\{\w+:-([^}]+)\}", r"\1", word) for word in services["worker"]["command"]]
    )
    served = services["vllm"]["command"]
    model = re.sub(r"\$\{\w+:-([^}]+)\}", r"\1", served[served.index("--model") + 1])
    assert options["command"] == "work"
    assert options["upstream"] == "http://vllm:8000/v1"
    assert options["models"] == (model,)
    assert PINNED.fullmatch(services["vllm"]["image"])
