"""Redis does not answer: each command that asks it ends soon, with one sentence and exit code 3."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from jobs.embedded import EmbeddedRedis
from tests.cli.conftest import COMMAND

# Of every command that operators and users have, those that ask Redis.
COMMANDS = [
    *("status", "status --host h", "limits", "limits jobs=5", "cancel j", "follow j"),
    *("models list", "jobs list", "jobs show j", "jobs requeue j", "jobs cancel j", "jobs purge j"),
    *("submit {file} -m demo", "chat -m demo hello", "work -m demo"),
]
SOME = ["status", "jobs list", "submit {file} -m demo"]


@pytest.fixture
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """Of a server whose process is stopped, or that takes connections and says nothing, or that
    takes none."""
    if request.param == "stopped":
        with EmbeddedRedis(port=0) as server:
            with redis.Redis.from_url(server.url) as client:
                pid = client.info("server")["process_id"]
            os.kill(pid, signal.SIGSTOP)
            yield server.tcp_url
            os.kill(pid, signal.SIGCONT)
        return
    with socket.create_server(
        ("127.0.0.1", 0), backlog=0 if request.param == "full" else 100
    ) as one:
        host, port = one.getsockname()
        waiting = []
        if request.param == "full":
            for _ in range(4):
                waiting.append(socket.socket())
                waiting[-1].setblocking(False)
                waiting[-1].connect_ex((host, port))
        yield f"redis://{host}:{port}/0"
        for other in waiting:
            other.close()


@pytest.mark.parametrize(
    ("url", "commands"),
    [("silent", COMMANDS), ("stopped", SOME), ("full", SOME)],
    indirect=["url"],
    ids=["silent", "stopped", "full"],
)
def test_every_command_says_that_redis_does_not_answer(
    url: str, commands: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "hello"}) + "\n")
    started: dict[str, Any] = {
        words: subprocess.Popen(
            [COMMAND, *words.format(file=file).split()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "CHATJOBS_REDIS_URL": url, "CHATJOBS_RESULTS": str(tmp_path)},
            text=True,
        )
        for words in commands
    }
    for words, process in started.items():
        shown, error = process.communicate()
        assert shown == "", words
        assert process.returncode == 3, (words, error)
        assert "does not answer within 3.5 s" in error, (words, error)
        assert error.count("\n") == 1, (words, error)
