"""`chatjobs models load|unload|pin|unpin` command running workers, and wait for their answers."""

from __future__ import annotations

import json

from jobs import keys
from tests.cli.conftest import Run
from tests.worker.site import Site


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
