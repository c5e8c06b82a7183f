"""A worker that still loads its models is named where people look for it."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs import keys
from tests.cli.conftest import Run
from tests.worker.site import PATIENCE, Site, WorkerProcess, wait_until

HOST = socket.gethostname()
MODEL = "org/slow"  # the fake backend calls it "slow"


@pytest.fixture
def site(redis_url: str, tmp_path: Path) -> Iterator[Site]:
    site = Site(redis_url, tmp_path / "results")
    site.client.serving = None
    yield site
    site.close()


@pytest.fixture
def loaded(tmp_path: Path) -> Path:
    """The load of the worker ends when this file exists."""
    return tmp_path / "loaded"


def start(
    site: Site, loaded: Path, *models: str, lease_seconds: float = 60.0
) -> tuple[WorkerProcess, str]:
    """A worker that is listed, and its name."""
    options = {"load_until": str(loaded), "lease_seconds": lease_seconds}
    worker = site.worker(models=list(models), **options)
    wait_until(lambda: site.redis.keys(keys.worker("*")) or not worker.alive)
    assert worker.alive, worker.output
    (name,) = site.redis.zrange(keys.WORKERS, 0, -1)
    return worker, name.decode()


def test_status_names_it_until_it_serves(run: Run, site: Site, loaded: Path) -> None:
    words = ("status", "--redis", site.url)
    site.submit(model="slow")
    assert "no workers" in run(*words).stdout
    worker, name = start(site, loaded, "other", MODEL)
    shown = run(*words)
    assert shown.exit_code == 0
    assert f"worker {name} is loading other, {MODEL}\n" in shown.stdout
    assert "no workers" not in shown.stdout
    loads = f"worker {name} is loading it"
    assert f"no worker serves 'slow' yet ({loads}): its jobs wait" in shown.stderr
    found = json.loads(run(*words, "--json").stdout)
    assert found["workers"] == []
    (facts,) = found["loading"]
    started = facts.pop("started_at")
    models = ["other", MODEL]
    assert facts == {"name": name, "host": HOST, "pid": worker.pid, "models": models}
    assert isinstance(started, float)
    loaded.touch()
    wait_until(lambda: json.loads(run(*words, "--json").stdout)["workers"])
    found = json.loads(run(*words, "--json").stdout)
    assert [one["name"] for one in found["workers"]] == [name]
    assert found["loading"] == []
    assert worker.stop() == 0


def test_it_counts_as_no_worker_of_its_host(run: Run, site: Site, loaded: Path) -> None:
    words = ("status", "--redis", site.url, "--host")
    _, name = start(site, loaded, MODEL)
    here = run(*words, HOST)
    assert here.exit_code == 1
    assert f"no worker on host {HOST} serves yet: worker {name} is loading {MODEL}" in here.stderr
    there = run(*words, "elsewhere")
    assert there.exit_code == 1
    assert name not in there.output
    loaded.touch()
    wait_until(lambda: run(*words, HOST).exit_code == 0)


@pytest.mark.parametrize("model", ["slow", MODEL])
def test_chat_and_submit_name_it(run: Run, site: Site, loaded: Path, model: str) -> None:
    _, name = start(site, loaded, MODEL)
    loads = f"worker {name} is loading it"
    to = ("-m", model, "--redis", site.url)
    submitted = run("submit", "-", *to, input='{"prompt": "hi"}')
    assert submitted.exit_code == 0
    text = f"no worker serves '{model}' yet ({loads}): its jobs wait until one does"
    assert text in submitted.stderr
    asked = run("chat", *to, "--wait", "0", "hi")
    assert asked.exit_code == 1
    assert f"no worker serves '{model}' yet ({loads}) after 0 s: wait longer" in asked.stderr
    limited = run("limits", "jobs=5", *to)
    assert "no worker serves" not in limited.stderr
    loaded.touch()
    answered = run("chat", *to, "--wait", str(PATIENCE), "hi")  # what the error says
    assert answered.exit_code == 0, answered.stderr


def test_a_wait_that_times_out_names_it(site: Site, loaded: Path) -> None:
    _, name = start(site, loaded, MODEL)
    with pytest.raises(Exception, match=f"'slow' yet .worker {name} is loading it"):
        site.submit(model="slow").result(timeout=0.05)


def test_two_workers_that_load_a_model_are_both_named(run: Run, site: Site, loaded: Path) -> None:
    for _ in range(2):
        site.worker(models=[MODEL], load_until=str(loaded), lease_seconds=60.0)
    wait_until(lambda: len(site.redis.keys(keys.worker("*"))) == 2)
    names = " and ".join(sorted(one.decode() for one in site.redis.zrange(keys.WORKERS, 0, -1)))
    submitted = run("submit", "-", "-m", "slow", "--redis", site.url, input='{"prompt": "hi"}')
    assert f"workers {names} are loading it" in submitted.stderr


def test_it_stays_listed_for_as_long_as_it_loads(run: Run, site: Site, loaded: Path) -> None:
    _, name = start(site, loaded, MODEL, lease_seconds=1.0)

    def lease() -> float:
        return float(site.redis.zscore(keys.WORKERS, name))

    first = lease()
    wait_until(lambda: lease() > first + 3000)  # three leases later
    wait_until(lambda: name in run("status", "--redis", site.url).stdout)


def test_a_load_that_fails_removes_the_worker(site: Site, loaded: Path) -> None:
    worker, name = start(site, loaded, "broken")
    loaded.touch()
    assert worker.wait() == 3
    assert not site.redis.exists(keys.worker(name), keys.WORKERS)


def test_a_worker_that_is_killed_while_it_loads_is_soon_not_listed(
    run: Run, site: Site, loaded: Path
) -> None:
    worker, name = start(site, loaded, MODEL, lease_seconds=1.0)
    worker.send(signal.SIGKILL)
    worker.wait()
    wait_until(lambda: name not in run("status", "--redis", site.url).stdout)
    assert "no workers" in run("status", "--redis", site.url).stdout


def test_older_workers_do_not_say_that_they_load(run: Run, site: Site) -> None:
    older: dict[str, Any] = {
        "name": "w1",
        "host": "h",
        "device": "cpu",
        "paused": "",
        "models": ["m"],
        "names": ["m"],
        "memory": {"weights": 1, "cache": 1},
        "running": 0,
        "tokens_per_second": 0.0,
    }
    site.redis.zadd(keys.WORKERS, {"w1": 1e13})
    site.redis.set(keys.worker("w1"), json.dumps(older))
    found = json.loads(run("status", "--json", "--redis", site.url).stdout)
    assert [one["name"] for one in found["workers"]] == ["w1"]
    assert found["loading"] == []
