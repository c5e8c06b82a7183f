"""`chatjobs models list` shows the models of workers; `load|unload|pin|unpin` command a worker."""

from __future__ import annotations

import json
from pathlib import Path

from jobs import keys
from jobs.store.worker_status import read_statuses, read_workers
from tests.cli.conftest import Run, Show
from tests.cli.test_json import documented
from tests.worker.site import Site, wait_until


def test_the_command_line_waits_for_the_worker(run: Run, site: Site) -> None:
    worker = site.worker(lease_seconds=30.0, models=["one", "two"], budget=150)
    site.wait_for_workers()
    (name,) = (one.decode() for one in site.redis.zrange(keys.WORKERS, 0, -1))
    here = ("--redis", site.url)
    loaded = run("models", "load", "two", "--json", *here)
    assert json.loads(loaded.stdout) == {
        **{"worker": name, "model": "two", "state": "ready", "pinned": False}
    }
    assert "one (unloaded), two " in run("status", *here).stdout
    refused = run("models", "pin", "two", "--worker", name[:-1], *here)
    assert refused.exit_code == 1 and "two can't be pinned" in refused.stderr
    nobody = run("models", "load", "three", *here)
    assert nobody.exit_code == 1
    assert "no running worker serves model 'three'" in nobody.stderr
    assert worker.stop() == 0


def test_the_models_of_workers_are_listed_with_state_memory_and_jobs(
    run: Run, show: Show, site: Site, tmp_path: Path
) -> None:
    here = ("models", "list", "--redis", site.url)
    empty = run(*here)
    assert (empty.exit_code, empty.stdout) == (0, "")
    assert empty.stderr == "no running worker serves a model\n"
    site.worker(lease_seconds=30.0, models=["one", "org/two"], budget=150)
    site.worker(lease_seconds=30.0, models=["plain"])
    site.worker(lease_seconds=30.0, models=["late"], load_until=str(tmp_path / "never"))
    site.wait_for_workers(2)
    wait_until(lambda: len(read_statuses(site.redis).loading) == 1)
    assert run("workers", "pause", "--all", "--redis", site.url).exit_code == 0
    for name in ("org/two", "two", "plain"):
        site.submit(model=name)
    found = [json.loads(line) for line in run(*here, "--json").stdout.splitlines()]
    assert {frozenset(one) for one in found} == {frozenset(documented("models list"))}
    shown = {
        one["model"]: [one[name] for name in ("state", "weight_bytes", "share_bytes", "queued")]
        for one in found
    }
    assert shown == {
        "late": ["loading", None, None, 0],
        "one": ["paused", 90, 120, 0],
        "plain": ["paused", 1, None, 1],
        "two": ["cold", 90, 120, 2],
    }
    on_terminal = show(*here, terminal=True, columns=80).out
    assert max(map(len, on_terminal.splitlines())) <= 80
    lines = show(*here).out.splitlines()
    assert lines[0].split() == ["model", "state", "queued", "memory", "device", "worker"]
    assert [line.split()[:3] for line in lines[1:]] == [
        ["late", "loading", "0"],
        ["one", "paused", "0"],
        ["plain", "paused", "1"],
        ["two", "cold", "2"],
    ]


def test_a_pinned_model_is_listed_as_pinned(run: Run, site: Site) -> None:
    site.worker(lease_seconds=30.0, models=["one", "two"], budget=300)
    site.wait_for_workers()
    here = ("--redis", site.url)
    assert run("models", "pin", "two", *here).exit_code == 0
    found = [json.loads(one) for one in run("models", "list", "--json", *here).stdout.splitlines()]
    assert {one["model"]: one["pinned"] for one in found} == {"one": False, "two": True}
    assert "ready, pinned" in run("models", "list", *here).stdout


def test_the_status_of_an_older_worker_lists_its_models(run: Run, site: Site) -> None:
    site.worker(lease_seconds=30.0, models=["one"])
    site.wait_for_workers()
    (status,) = read_workers(site.redis)
    old = {name: value for name, value in status.items() if name not in ("about", "states")}
    site.redis.zadd(keys.WORKERS, {"w": 1e13})
    site.redis.set(keys.worker("w"), json.dumps({**old, "name": "w"}))
    listed = run("models", "list", "--json", "--redis", site.url).stdout.splitlines()
    found = {one["worker"]: one for one in map(json.loads, listed)}
    assert found["w"]["weight_bytes"] is None and found["w"]["state"] == "ready"
    site.redis.set(keys.worker("w"), json.dumps({**status, "name": "w", "about": {"one": 7}}))
    assert len(run("models", "list", "--json", "--redis", site.url).stdout.splitlines()) == 1
