"""Redis hangs when a command has begun to wait for a job: it says so, and goes on afterwards."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import COMMAND, Run
from tests.worker.site import PATIENCE, Site, wait_until


@pytest.fixture
def site(redis_url: str, tmp_path: Path) -> Iterator[Site]:
    site = Site(redis_url, tmp_path / "results")
    site.client.serving = None
    yield site
    site.close()


class Command:
    """A command whose output is read while it runs."""

    def __init__(self, site: Site, *words: str, text: str = "") -> None:
        self.process = subprocess.Popen(
            [COMMAND, *words, "--redis", site.url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdin
        self.process.stdin.write(text)
        self.process.stdin.close()
        self.out = self.err = ""
        self._readers = [threading.Thread(target=self._read, args=[one]) for one in ("out", "err")]
        for reader in self._readers:
            reader.start()

    def says(self, text: str) -> bool:
        assert self.process.poll() is None, self.err
        return text in self.err

    def end(self) -> int:
        for reader in self._readers:
            reader.join()
        return self.process.wait()

    def _read(self, name: str) -> None:
        stream = getattr(self.process, f"std{name}")
        for line in stream:
            setattr(self, name, getattr(self, name) + line)
        stream.close()


WAITING = {  # with what each says before its job has started
    "chat -m fake --wait 600 hello": "no worker serves 'fake'",
    "follow j": "no worker serves 'fake'",
    "submit - -m fake --wait": "no worker serves 'fake'",
}


@pytest.mark.parametrize("words", WAITING)
def test_a_command_that_waits_says_that_redis_hangs_and_goes_on(words: str, site: Site) -> None:
    if words == "follow j":
        site.submit("hello", id="j")
    command = Command(site, *words.split(), text=json.dumps({"prompt": "hello"}))
    wait_until(lambda: command.says(WAITING[words]))
    with site.paused_server():
        wait_until(lambda: command.says("does not answer: trying again"))
    wait_until(lambda: command.says("answers again"))
    site.worker()
    assert command.end() == 0, command.err
    assert command.err.count("does not answer") == 1
    same = site.submit("hello").result(timeout=PATIENCE)
    assert str(same.text).split()[0] in command.out


def both_wait(site: Site) -> bool:
    """True if two commands have subscribed to messages for a second: they wait for these alone."""
    waiting = [one for one in site.redis.client_list(_type="pubsub") if int(one["idle"]) >= 1]
    return len(waiting) == 2


def test_a_quiet_command_goes_on_without_a_word(site: Site) -> None:
    site.submit("hello", id="j")
    loud, quiet = (Command(site, "follow", "j", *words) for words in ([], ["-q"]))
    wait_until(lambda: loud.says("no worker serves 'fake'"))
    wait_until(lambda: both_wait(site))
    with site.paused_server():
        wait_until(lambda: loud.says("does not answer"))
    site.worker()
    assert (loud.end(), quiet.end()) == (0, 0)
    assert quiet.out == loud.out != ""
    assert quiet.err == ""


def test_ctrl_c_ends_a_chat_whose_redis_hangs_and_says_that_the_job_may_go_on(site: Site) -> None:
    command = Command(site, "chat", "-m", "fake", "--wait", "600", "hello")
    wait_until(lambda: command.says("no worker serves 'fake'"))
    (key,) = site.redis.keys("rq:job:*")
    job = key.decode().removeprefix("rq:job:")
    with site.paused_server():
        wait_until(lambda: command.says("does not answer"))
        command.process.send_signal(signal.SIGINT)
        assert command.end() == 130
    stops = f"chatjobs cancel {job}"
    assert f"interrupted; job {job} may go on: {stops} stops it" in command.err
    cancelled = subprocess.run([COMMAND, *stops.split()[1:], "--redis", site.url], check=False)
    assert cancelled.returncode == 0
    assert site.client.job(job).status() == "cancelled"


def test_results_are_shown_while_redis_hangs(run: Run, site: Site, finished_run: Path) -> None:
    """They are on the disk. What waits in Redis is not known then."""
    words = ("--results", str(finished_run), "--redis", site.url)
    with site.paused_server():
        runs = run("results", "--json", *words)
        rows = run("results", "r1", "--json", *words)
        summary = run("results", "r1", *words)
    assert [one.exit_code for one in (runs, rows, summary)] == [0, 0, 0]
    assert json.loads(runs.stdout) == {"run": "r1", "rows": 3, "unwritten": None}
    assert len(rows.stdout.splitlines()) == 3
    assert "rows" in summary.stdout
