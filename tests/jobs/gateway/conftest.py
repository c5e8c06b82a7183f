"""Gateways as processes, on a real Redis server and real workers."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.cli.conftest import COMMAND
from tests.waiting import PATIENCE, wait_until
from tests.worker.site import ROOT, Site

ADDRESS = re.compile(r"serving (https?)://(.*):(\d+)/v1")
# A gateway with settings that no option has, such as its time limits. It comes up slowly.
WITH_SETTINGS = (
    "import asyncio, uvicorn; serves = uvicorn.Server.serve\n"
    "async def serve_late(*words, **options):\n"
    "    await asyncio.sleep(0.3); await serves(*words, **options)\n"
    "uvicorn.Server.serve = serve_late\n"
    "import json, sys, logging; from pathlib import Path\n"
    "from jobs.gateway.server import serve; from jobs.gateway.settings import Settings\n"
    "logging.basicConfig(level=logging.INFO)\n"
    "given = json.loads(sys.argv[0])\n"
    "files = {'results', 'api_key_file'} & given.keys()\n"
    "serve(Settings(**given | {name: Path(given[name]) for name in files}))"
)


class GatewayProcess:
    """`chatjobs serve` on a free port; with `settings`, the same without its command line."""

    def __init__(self, url: str, *options: str, **settings: Any) -> None:
        command: list[Any] = [COMMAND, "serve", "--port", "0", "--redis", url, *options]
        if settings:
            given = {"redis_url": url, "port": 0, **settings}
            command = [sys.executable, "-m", "tests.run_code", WITH_SETTINGS, json.dumps(given)]
        self._process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        self.output = ""  # of stderr
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        wait_until(lambda: ADDRESS.search(self.output) or self._process.poll() is not None)
        found = ADDRESS.search(self.output)
        assert found, self.output
        self.port = int(found[3])
        self.url = f"{found[1]}://127.0.0.1:{self.port}"

    def http(self, **headers: str) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, headers=headers, timeout=PATIENCE)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
        self._process.wait(PATIENCE)
        self._reader.join(PATIENCE)

    def request_stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def stop(self) -> int:
        self.request_stop()
        return self.wait()

    def wait(self) -> int:
        code = self._process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return code

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.output += line
        self._process.stderr.close()


Start = Callable[..., GatewayProcess]


@pytest.fixture
def site(redis_url: str, tmp_path: Path) -> Iterator[Site]:
    """An empty Redis and an empty results folder."""
    site = Site(redis_url, tmp_path / "results")
    yield site
    site.close()


@pytest.fixture
def start(site: Site) -> Iterator[Start]:
    """Starts gateways, which are killed at the end of the test."""
    started: list[GatewayProcess] = []

    def start(*options: str, url: str = site.url, **settings: Any) -> GatewayProcess:
        if settings:
            settings = {"results": str(site.folder), **settings}
        else:
            options = ("--results", str(site.folder), *options)  # a later one holds
        started.append(GatewayProcess(url, *options, **settings))
        return started[-1]

    yield start
    for one in started:
        one.kill()


def chat(prompt: str = "hello", **fields: Any) -> dict[str, Any]:
    """The body of a request; `fields` may instruct the fake backend by `metadata`."""
    return {"model": "fake", "messages": [{"role": "user", "content": prompt}], **fields}


def read_events(lines: Iterator[str]) -> Iterator[tuple[str | None, str]]:
    """The id and the data of each event."""
    id, data = None, []
    for line in lines:
        name, _, value = line.partition(": ")
        if line == "" and data:
            yield id, "\n".join(data)
            id, data = None, []
        elif name == "id":
            id = value
        elif name == "data":
            data.append(value)


def text_in(events: list[tuple[str | None, str]]) -> str:
    """The content of the first choice in these events."""
    chunks = [json.loads(data) for _, data in events if data != "[DONE]"]
    return "".join(
        choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]
    )
