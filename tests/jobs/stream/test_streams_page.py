"""The examples of docs/streams.md do what the page says."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from jobs import Client
from tests.jobs.conftest import StepwiseWorker
from tests.servers import free_port
from tests.waiting import PATIENCE

PAGE = (Path(__file__).parents[3] / "docs" / "streams.md").read_text(encoding="utf-8")
REQUEST: Any = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}


def example(heading: str) -> str:
    """The Python block of a section."""
    section = re.split(r"^#+ ", PAGE.partition(f"# {heading}\n")[2], flags=re.M)[0]
    (code,) = re.findall(r"^```python\n(.*?)^```", section, re.M | re.S)
    return code


class Event(NamedTuple):
    id: str | None
    name: str
    data: Any


class Browser:
    """An EventSource: its `text`, and the id that it sends when it connects again."""

    def __init__(self, port: int, job: str) -> None:
        self.text = ""
        self._port, self._path = port, f"/jobs/{job}"
        self._last: str | None = None
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)

    def connect(self) -> Iterator[Event]:
        """Closes the connection before, as a network does that changes."""
        self._connection.close()
        self._connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE)
        headers = {} if self._last is None else {"Last-Event-ID": self._last}
        self._connection.request("GET", self._path, headers=headers)
        response = self._connection.getresponse()
        assert response.headers["Content-Type"] == "text/event-stream"
        fields: dict[str, str] = {}
        while line := response.readline().decode():
            name, _, value = line.rstrip("\n").partition(": ")
            if name:
                fields[name] = value
                continue
            event = Event(fields.get("id"), fields["event"], json.loads(fields["data"]))
            self._take(event)
            yield event
            fields = {}

    def _take(self, event: Event) -> None:
        self._last = event.id or self._last
        if event.name == "reset":
            self.text = ""
        elif event.name == "chunk" and event.data["choices"]:
            self.text += event.data["choices"][0]["delta"].get("content") or ""


@pytest.fixture
def port(redis_url: str) -> Iterator[int]:
    """Of a server that runs the example."""
    port = free_port()
    code = example("Server-sent events").replace("8000", str(port))
    environment = {**os.environ, "CHATJOBS_REDIS_URL": redis_url}
    server = subprocess.Popen([sys.executable, "-c", code], env=environment)
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port)):
                break
        except OSError:
            assert server.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
    yield port
    server.kill()
    server.wait()


def test_the_plain_loop_prints_the_answer_once(
    client: Client, worker: StepwiseWorker, capsys: pytest.CaptureFixture[str]
) -> None:
    job = client.submit(REQUEST)
    worker.start(job.id)
    worker.write(job.id, 1, 1, "forty-")
    worker.requeue(job.id)
    worker.start(job.id)
    worker.write(job.id, 2, 1, "forty-two")
    worker.finish(job.id, "forty-two", attempt=2)
    exec(example("Streams"), {"client": client, "job": job})
    assert capsys.readouterr().out == "forty-two"


@pytest.mark.parametrize("heading", ["A worker that dies", "Resuming"])
def test_a_reader_has_the_answer_in_the_end(
    client: Client, worker: StepwiseWorker, heading: str
) -> None:
    job = client.submit(REQUEST)
    worker.start(job.id)
    for seq, text in enumerate(["one two ", "three four ", "five"], 1):
        worker.write(job.id, 1, seq, text)
    worker.finish(job.id, "one two three four five")
    names: dict[str, Any] = {"client": client, "job": job}
    exec(example(heading), names)
    assert names["text"] == "one two three four five"


def test_a_browser_that_connects_again_sees_each_event_once(
    client: Client, worker: StepwiseWorker, port: int
) -> None:
    job = client.submit(REQUEST)
    browser = Browser(port, job.id)
    worker.start(job.id)
    for seq, text in enumerate("abc", 1):
        worker.write(job.id, 1, seq, text)
    stream = browser.connect()
    assert [next(stream).id, next(stream).id] == ["1-1", "1-2"]
    worker.requeue(job.id)  # while the browser is away
    worker.start(job.id)
    worker.write(job.id, 2, 1, "abcd")
    stream = browser.connect()
    assert next(stream).id == "2-1"
    assert browser.text == "abcd"
    worker.requeue(job.id)
    worker.start(job.id)
    worker.write(job.id, 3, 1, "another ")
    assert [next(stream).name, next(stream).name] == ["reset", "chunk"]
    stream = browser.connect()
    worker.write(job.id, 3, 2, "answer", finish_reason="stop")
    worker.finish(job.id, "another answer", attempt=3)
    assert [event.name for event in stream] == ["chunk", "end"]
    assert browser.text == "another answer"
    assert [event.name for event in browser.connect()] == ["end"]


def test_a_browser_is_told_what_is_wrong(port: int) -> None:
    (event,) = Browser(port, "nobody").connect()
    assert event.name == "failed"
    assert event.data["code"] == "not_found"
