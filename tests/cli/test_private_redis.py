"""`work --redis embedded`: nothing that its private Redis holds is lost without a word."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs import Client, RequestFields, Results
from jobs.embedded import EmbeddedRedis
from tests.cli.conftest import COMMAND, Run
from tests.worker.site import PATIENCE, wait_until

ROOT = Path(__file__).parents[2]
LOADS_FOR_EVER = """
import time
from worker.host.engine_host import EngineHost
EngineHost.load = lambda *_: time.sleep(3600)
"""
REQUEST: RequestFields = {
    "model": "demo",
    "messages": [{"role": "user", "content": "2+3"}],
    "max_tokens": 4,
    "temperature": 0,
}


def server_of(client: Client) -> int:
    """The process of the server."""
    return int(client.redis.info("server")["process_id"])


class Work:
    """`chatjobs work` with a private Redis, as a process. Further words are options. It has written
    `until` then. `code`: runs in its process before the command."""

    def __init__(
        self,
        folder: Path,
        *words: str,
        until: str = " serves demo",
        code: str = "",
        **environment: str,
    ) -> None:
        command = [str(COMMAND)]
        if code:
            code += "\nfrom jobs.cli import main; main()"
            command = [sys.executable, "-m", "tests.run_code", code, "chatjobs"]
        command += ["work", "-m", "demo", "--results", str(folder), *words]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT if code else None,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        self.output = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        wait_until(lambda: until in self.output or self.process.poll() is not None)

    @property
    def url(self) -> str:
        found = re.search(r"private Redis: --redis (\S+),", self.output)
        assert found, self.output
        return found[1]

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        code = self.process.wait(timeout=PATIENCE)
        self._reader.join(60)
        return code

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.output += line
        self.process.stderr.close()


def is_in_file(folder: Path, job: str) -> bool:
    """True if a server has written a job to its append-only file: while a sync of that file lasts,
    it replies before it writes."""
    return any(job.encode() in file.read_bytes() for file in folder.glob("appendonlydir/*.aof"))


def next_command(output: str) -> list[str]:
    """The command that goes on, as the message names it."""
    found = re.search(r"go on with: chatjobs (.*)", output)
    assert found, output
    return shlex.split(found[1])


def test_rows_that_can_not_be_written_are_kept_with_a_command_that_goes_on(
    run: Run, tmp_path: Path
) -> None:
    results = tmp_path / "results"
    work = Work(results, "--redis", "embedded", TMPDIR=str(tmp_path))
    (results / "r1").write_text("in the way")
    with Client(work.url) as client:
        jobs = client.submit_many({**REQUEST, "job": {"run": "r1", "row": n}} for n in range(3))
        client.gather(jobs, timeout=PATIENCE)
    assert work.stop() == 3
    assert "3 rows not written: kept in " in work.output
    assert str(results / "r1") in work.output  # the reason, in the log
    (results / "r1").unlink()
    words = next_command(work.output)
    again = Work(results, *words[words.index("--redis") :], "--burst")
    assert again.wait() == 0
    assert sorted(row["row_index"] for row in Results(results).table("r1").to_pylist()) == [0, 1, 2]
    assert "not written" not in again.output
    folder = Path(words[words.index("--redis") + 1].removeprefix("embedded:"))
    with EmbeddedRedis(folder, append_only=True) as redis:
        shown = run("results", "--json", "--results", str(results), "--redis", redis.url)
    assert json.loads(shown.stdout) == {"run": "r1", "rows": 3, "unwritten": 0}  # none comes twice


def test_kept_rows_can_go_to_another_folder(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    work = Work(first, "--redis", "embedded", TMPDIR=str(tmp_path))
    (first / "r1").write_text("in the way")
    with Client(work.url) as client:
        client.submit({**REQUEST, "job": {"run": "r1", "row": 0}}).result(timeout=PATIENCE)
    assert work.stop() == 3
    words = next_command(work.output)
    assert Work(second, *words[words.index("--redis") :], "--burst").wait() == 0
    assert Results(second).table("r1").num_rows == 1


def test_jobs_that_have_not_ended_are_kept_too(tmp_path: Path) -> None:
    results = tmp_path / "results"
    work = Work(results, "--redis", "embedded", TMPDIR=str(tmp_path))
    with Client(work.url) as client:
        client.serving = None
        client.submit({**REQUEST, "model": "other"})
        client.submit({**REQUEST, "job": {"delay": 3600}})
    assert work.stop() == 0
    assert "2 jobs not ended: kept in " in work.output
    words = next_command(work.output)
    again = Work(results, *words[words.index("--redis") :])
    with Client(again.url) as client:
        assert client.redis.llen("rq:queue:chat:other") == 1
    assert again.stop() == 0


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose path is short enough for the socket of a private server."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        yield Path(folder)


def test_nothing_is_kept_if_nothing_is_left(tmp_path: Path, short: Path) -> None:
    results = tmp_path / "results"
    work = Work(results, "--redis", "embedded", TMPDIR=str(short))
    assert list(short.glob("chatjobs-*"))
    with Client(work.url) as client:
        client.submit(REQUEST).result(timeout=PATIENCE)
    assert work.stop() == 0
    assert "kept in" not in work.output
    assert not list(short.glob("chatjobs-*"))
    assert Results(results).table("default").num_rows == 1


def test_the_loss_is_said_if_nothing_can_be_kept(tmp_path: Path, short: Path) -> None:
    results = tmp_path / "results"
    work = Work(results, "--redis", "embedded", TMPDIR=str(short))
    (results / "r1").write_text("in the way")
    with Client(work.url) as client:
        client.submit({**REQUEST, "job": {"run": "r1", "row": 0}}).result(timeout=PATIENCE)
    (folder,) = short.glob("chatjobs-*")
    (folder / "appendonlydir").write_text("in the way")
    assert work.stop() == 3
    assert "1 row not written: lost with the private Redis, which can't be kept: " in work.output
    assert str(folder) in work.output


def test_the_loss_is_said_if_the_private_server_has_ended(tmp_path: Path) -> None:
    work = Work(tmp_path / "results", "--redis", "embedded", "--grace", "0", TMPDIR=str(tmp_path))
    with Client(work.url) as client:
        pid = server_of(client)
    work.process.send_signal(signal.SIGSTOP)  # it sees the end of the server with SIGTERM
    os.kill(pid, signal.SIGKILL)
    work.process.send_signal(signal.SIGTERM)
    work.process.send_signal(signal.SIGCONT)
    assert work.wait() == 3
    assert "the private Redis has ended (SIGKILL): the jobs and rows" in work.output


def test_a_worker_ends_with_its_private_server(tmp_path: Path) -> None:
    work = Work(tmp_path / "results", "--redis", "embedded", TMPDIR=str(tmp_path))
    with Client(work.url) as client:
        client.submit({**REQUEST, "ignore_eos": True, "max_tokens": 400, "n": 4})
        os.kill(server_of(client), signal.SIGKILL)
    assert work.wait() == 3
    assert work.output.splitlines()[-1] == (
        "error: the private Redis has ended (SIGKILL): the jobs and rows that it held are lost; "
        "start the command again, with --redis embedded:DIR to keep them on the disk"
    )
    assert "later" not in work.output
    assert "Traceback" not in work.output


def test_a_worker_that_ends_with_a_server_in_a_folder_names_the_command_that_goes_on(
    tmp_path: Path, short: Path
) -> None:
    results = tmp_path / "results"
    work = Work(results, "--redis", f"embedded:{short}")
    with Client(work.url) as client:
        job = client.submit({**REQUEST, "job": {"run": "r1", "row": 0, "delay": 1}})
        wait_until(lambda: is_in_file(short, job.id))
        os.kill(server_of(client), signal.SIGKILL)
    assert work.wait() == 3
    assert f"the jobs and rows that it has written to {short} are kept" in work.output
    words = next_command(work.output)
    again = Work(results, *words[words.index("--redis") :])
    with Client(again.url) as client:
        assert client.job(job.id).result(timeout=PATIENCE).choices
    assert again.stop() == 0
    assert Results(results).table("r1").num_rows == 1


def test_a_worker_that_loads_ends_with_its_private_server(tmp_path: Path) -> None:
    words = ["--redis", "embedded"]
    loads = {"code": LOADS_FOR_EVER, "until": "private Redis:"}
    work = Work(tmp_path / "results", *words, **loads, TMPDIR=str(tmp_path))
    with Client(work.url) as client:
        os.kill(server_of(client), signal.SIGKILL)
    assert work.wait() == 3
    assert " serves demo" not in work.output
    assert "the private Redis has ended (SIGKILL)" in work.output.splitlines()[-1]


@pytest.mark.parametrize("as_json", [False, True])
def test_the_demo_ends_with_its_private_server(tmp_path: Path, short: Path, as_json: bool) -> None:
    words = ["demo", "--results", str(tmp_path), *(["--json"] if as_json else [])]
    demo = subprocess.Popen(
        [COMMAND, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(short)},
    )
    wait_until(lambda: list(short.glob("chatjobs-*/redis.sock")) or demo.poll() is not None)
    (socket,) = short.glob("chatjobs-*/redis.sock")
    with Client(f"unix://{socket}") as client:
        wait_until(lambda: client.redis.exists("rq:queue:bulk:demo") or demo.poll() is not None)
        os.kill(server_of(client), signal.SIGKILL)
    out, err = demo.communicate(timeout=PATIENCE)
    assert (demo.returncode, out) == (3, ""), err
    text = (
        "the demo's private Redis has ended (SIGKILL), and the answers that it held are lost: run "
        "the demo again"
    )
    last = err.splitlines()[-1]
    assert (json.loads(last)["error"]["message"] if as_json else last) in (text, f"error: {text}")
    assert "Traceback" not in err


def test_a_folder_is_used_by_one_private_server(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "redis"
    work = Work(tmp_path / "results", "--redis", f"embedded:{folder}")
    other = run("work", "-m", "demo", "--redis", f"embedded:{folder}")
    assert other.exit_code == 3
    assert f"a private Redis runs in {folder} already" in other.stderr
    assert work.url in other.stderr
    assert work.stop() == 0
    long = run("work", "-m", "demo", "--redis", f"embedded:{tmp_path / ('x' * 100)}")
    assert long.exit_code == 3
    assert "too long for a private Redis" in long.stderr


@pytest.mark.parametrize("words", ["chat -m demo hi", "submit - -m demo", "status"])
def test_clients_refuse_a_private_redis_with_a_folder_too(run: Run, words: str) -> None:
    result = run(*words.split(), "--redis", "embedded:x", input='{"prompt": "a"}')
    assert result.exit_code == 2
    assert "chatjobs work --model M --redis embedded" in result.stderr


def test_the_demo_says_that_its_answers_are_lost(tmp_path: Path) -> None:
    results = tmp_path / "results"
    (results / "r1").mkdir(parents=True)
    (results / "r1/samples").write_text("in the way")
    demo = subprocess.run(
        [COMMAND, "demo", "--rows", "20", "--run", "r1", "--results", results],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert demo.returncode == 3
    assert "the answers are lost with the demo's private Redis" in demo.stderr
    assert str(results / "r1") in demo.stderr
