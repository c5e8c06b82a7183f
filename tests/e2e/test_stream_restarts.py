"""Plain loops over streams whose worker is killed in the middle: real workers, a real model."""

from __future__ import annotations

import asyncio
import subprocess
import threading
from collections.abc import Callable
from typing import Any

import pytest

from jobs import AsyncClient, Client, StreamRestarted, keys
from tests.cli.conftest import COMMAND
from tests.worker.site import PATIENCE, Site, WorkerProcess, wait_until

# A long answer: the worker is killed while it generates.
LONG: dict[str, Any] = {"max_tokens": 250, "ignore_eos": True}
WORKER = {"real": True, "models": ["demo"], "max_batch": 1}
MESSAGES: Any = [{"role": "user", "content": "Tell me a long story"}]


class Reader(threading.Thread):
    """Runs a plain loop in a thread. `text` is what it has appended, `error` what ended it."""

    def __init__(self, loop: Callable[[Reader], None]) -> None:
        super().__init__(daemon=True)
        self._loop = loop
        self.text = ""
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self._loop(self)
        except Exception as error:
            self.error = error

    def end(self) -> str:
        self.join(5 * PATIENCE)
        assert not self.is_alive(), "the stream did not end"
        return self.text


def sync_loop(url: str, job: str, **options: Any) -> Reader:
    def loop(reader: Reader) -> None:
        with Client(url) as client:
            for chunk in client.job(job).stream(**options):
                reader.text = ("" if chunk.reset else reader.text) + chunk.text

    return Reader(loop)


def async_loop(url: str, job: str) -> Reader:
    async def follow(reader: Reader) -> None:
        async with AsyncClient(url) as client:
            async for chunk in client.job(job).stream():
                reader.text += chunk.text

    return Reader(lambda reader: asyncio.run(follow(reader)))


def openai_loop(client: Client, found: list[str], **fields: Any) -> Reader:
    """The loop of code that was written for the openai package."""

    def loop(reader: Reader) -> None:
        stream = client.chat.completions.create(
            model="demo",
            messages=MESSAGES,
            stream=True,
            max_tokens=LONG["max_tokens"],
            extra_body=fields,
        )
        found.append(stream.job.id)
        for chunk in stream:
            reader.text += chunk.choices[0].delta.content or ""

    return Reader(loop)


def session_loop(client: Client, found: list[str], **fields: Any) -> Reader:
    def loop(reader: Reader) -> None:
        session = client.session(model="demo", **LONG, **fields)
        for chunk in session.stream("Tell me a long story", job={"id": "turn"}):
            found.append("turn")
            reader.text += chunk.text

    return Reader(loop)


class FollowCommand:
    """`chatjobs follow` in a pipe. `begin` returns when it has printed something."""

    def __init__(self, url: str, job: str, *options: str) -> None:
        words = [str(COMMAND), "follow", job, "--redis", url, *options]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(words, stdout=pipe, stderr=pipe, bufsize=0)
        self._first = b""

    def begin(self) -> FollowCommand:
        assert self._process.stdout is not None
        self._first = self._process.stdout.read(1)
        return self

    def end(self) -> tuple[int, str, str]:
        """Exit code, stdout and stderr."""
        output, problems = self._process.communicate(timeout=PATIENCE * PATIENCE)
        return self._process.returncode, (self._first + output).decode(), problems.decode()


def freeze_in_the_middle(site: Site, worker: WorkerProcess, job: str) -> None:
    """So that the answer does not end before all readers have begun."""
    wait_until(lambda: site.redis.xlen(keys.log(job)) >= 8)
    worker.freeze()
    assert site.client.job(job).status() == "started"


def kill_in_the_middle(site: Site, worker: WorkerProcess, job: str, readers: list[Reader]) -> None:
    wait_until(lambda: all(reader.text for reader in readers))
    worker.kill()
    assert site.client.job(job).status() == "started"
    site.worker(**WORKER)


@pytest.mark.parametrize("make", [openai_loop, session_loop])
def test_a_killed_worker_repeats_no_part_of_a_greedy_answer(
    site: Site, make: Callable[..., Reader]
) -> None:
    worker = site.worker(**WORKER)
    found: list[str] = []
    caller = make(site.client, found, temperature=0, **({} if make is session_loop else LONG))
    wait_until(lambda: found)
    job = found[0]
    freeze_in_the_middle(site, worker, job)
    readers = [caller, sync_loop(site.url, job), async_loop(site.url, job)]
    command = FollowCommand(site.url, job).begin()
    kill_in_the_middle(site, worker, job, readers)
    texts = [reader.end() for reader in readers]
    answer = site.client.job(job).result(timeout=PATIENCE * PATIENCE).text
    assert [reader.error for reader in readers] == [None] * 3
    assert texts == [answer] * 3
    assert command.end()[:2] == (0, f"{answer}\n")
    assert site.hash(site.client.job(job))["chatjobs_attempt"] == "2"


def test_a_killed_worker_whose_answer_is_another_one_ends_plain_loops_with_an_error(
    site: Site,
) -> None:
    """Sampled without a seed, so hot that every token is nearly as likely: each attempt has another
    answer. At 1.5 one in twenty began with the same words."""
    worker = site.worker(**WORKER)
    job = site.submit("Tell me a long story", model="demo", temperature=20, **LONG).id
    freeze_in_the_middle(site, worker, job)
    plain = [sync_loop(site.url, job), async_loop(site.url, job)]
    aware = sync_loop(site.url, job, on_restart="reset")
    command, as_json = FollowCommand(site.url, job), FollowCommand(site.url, job, "--json")
    command.begin()
    as_json.begin()
    kill_in_the_middle(site, worker, job, [*plain, aware])
    for reader in plain:
        reader.end()
        assert isinstance(reader.error, StreamRestarted), reader.error
        assert reader.error.job_id == job
    answer = site.client.job(job).result(timeout=PATIENCE * PATIENCE).text
    assert aware.end() == answer and aware.error is None
    assert sync_loop(site.url, job).end() == answer  # as the error says
    code, _, problems = command.end()
    assert code == 1
    assert "its answer differs from the part that is printed: discard that; " in problems
    assert FollowCommand(site.url, job).end()[:2] == (0, f"{answer}\n")  # as the error says
    code, output, _ = as_json.end()
    assert (code, output.count('"reset":true')) == (0, 1)
