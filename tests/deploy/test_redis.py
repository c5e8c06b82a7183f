"""A server starts with the shipped settings, and has what chatjobs needs."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import redis

from jobs.embedded import HASH_BYTES, server_binary
from tests.deploy.command_line import DEPLOY
from tests.worker.site import Site, wait_until

CONF = DEPLOY / "redis/chatjobs.conf"


def replies(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False


def test_a_worker_finds_nothing_to_say_about_a_server_with_these_settings(tmp_path: Path) -> None:
    path = tmp_path / "redis.sock"
    words = ["--port", "0", "--unixsocket", str(path), "--dir", str(tmp_path)]
    server = subprocess.Popen(
        [server_binary(), str(CONF), *words], stdout=subprocess.DEVNULL, cwd=tmp_path
    )
    try:
        url = f"unix://{path}"
        with redis.Redis.from_url(url) as client:
            wait_until(lambda: replies(client))
            found: Any = client.config_get("*")
            assert found["appendonly"] == "yes" and found["appendfsync"] == "everysec"
            assert found["no-appendfsync-on-rewrite"] == "no"
            assert found["maxmemory-policy"] == "noeviction"
            assert int(found["hash-max-listpack-value"]) == HASH_BYTES
        site = Site(url, tmp_path / "results")
        worker = site.worker()
        assert site.submit("a", run="r").result(timeout=600)
        assert worker.stop() == 0
        assert "append-only" not in worker.output and "hash-max" not in worker.output
        site.close()
    finally:
        server.terminate()
        server.wait()
