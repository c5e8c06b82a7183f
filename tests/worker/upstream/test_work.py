"""`chatjobs work --upstream`: its start, its end, and its death, as a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from jobs.cli import build
from jobs.client.serving import NobodyServes
from jobs.store.worker_status import read_workers
from tests.cli.conftest import COMMAND
from tests.waiting import PATIENCE
from tests.worker.site import Site, wait_until
from tests.worker.upstream.fake_server import Exchange, FakeServer, echo
from tests.worker.upstream.test_answers import text_of

KEY = "CHATJOBS_UPSTREAM_API_KEY"
# The packages of the extra `worker`, and what it asks for by itself.
UNNEEDED = (
    *("torch", "safetensors", "gguf", "tokenizers", "huggingface_hub", "jinja2"),
    "prometheus_client",
)


class Worker:
    """The command, with its stderr."""

    def __init__(self, site: Site, *words: str, **variables: str) -> None:
        inherited = {name: value for name, value in os.environ.items() if name != KEY}
        command = [str(COMMAND), "work", "--redis", site.url, "--results", str(site.folder)]
        self.process = subprocess.Popen(
            [*command, *words], env={**inherited, **variables}, stderr=subprocess.PIPE, text=True
        )
        self.output = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.output += line
        self.process.stderr.close()

    def says(self, text: str) -> None:
        wait_until(lambda: text in self.output, f"{text!r} is not in {self.output}")

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        code = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return code


Start = Callable[..., Worker]


@pytest.fixture
def start(site: Site, server: FakeServer) -> Iterator[Start]:
    started: list[Worker] = []

    def run(*words: str, url: str = "", **variables: str) -> Worker:
        words = words or ("--model", "fake=there")
        started.append(Worker(site, "--upstream", url or server.url, *words, **variables))
        return started[-1]

    yield run
    for worker in started:
        if worker.process.poll() is None:
            worker.end(signal.SIGKILL)


def test_jobs_of_a_killed_worker_are_run_by_another_and_each_has_one_row(
    site: Site, server: FakeServer, start: Start
) -> None:
    killed = threading.Event()

    def answer(exchange: Exchange) -> None:
        if killed.is_set() or server.bodies.index(exchange.body) % 3 == 0:
            echo(exchange)
        else:
            exchange.begin()
            exchange.chunk(content="half an ")
            exchange.closed()

    server.answer = answer
    jobs = site.submit_many([f"q{number}" for number in range(100)], run="r")
    first = start("--model", "fake=there", "--max-batch", "8")
    wait_until(lambda: server.running == 8)
    assert first.end(signal.SIGKILL) == -signal.SIGKILL
    killed.set()
    second = start()
    wait_until(lambda: all(job.status().over for job in jobs))
    assert second.end(signal.SIGTERM) == 0
    answers = [text_of(f"q{number}") for number in range(100)]
    assert [job.result(timeout=1).text for job in jobs] == answers
    site.assert_settled(jobs, "r")
    assert {row["status"] for row in site.rows("r")} == {"ok"}


def test_a_worker_that_stops_gives_back_what_does_not_end_in_time(
    site: Site, server: FakeServer, start: Start
) -> None:
    stopping = threading.Event()

    def answer(exchange: Exchange) -> None:
        exchange.begin()
        exchange.chunk(content="half an ")
        if exchange.prompt == "short":
            stopping.wait(60)
            exchange.chunk(content="answer", reason="stop")
            exchange.end()
        else:
            exchange.closed()

    server.answer = answer
    short, long, waits = site.submit_many(["short", "long", "waits"])
    worker = start("--model", "fake=there", "--max-batch", "2", "--grace", "5")
    wait_until(lambda: server.running == 2)
    worker.process.send_signal(signal.SIGTERM)
    worker.says("stopping: no new jobs")
    stopping.set()
    assert worker.process.wait(PATIENCE) == 0
    assert short.result(timeout=1).text == "half an answer"
    assert [job.status().value for job in (long, waits)] == ["queued", "queued"]
    assert not site.hash(long).get("chatjobs_retried")
    server.answer = echo
    assert start("--model", "fake=there", "--burst").process.wait(PATIENCE) == 0
    assert long.result(timeout=1).text == text_of("long")
    site.assert_settled([short, long, waits])


def test_what_is_submitted_to_an_upstream_alone_is_said_not_to_be_scored(
    site: Site, server: FakeServer, start: Start
) -> None:
    start()
    site.wait_for_workers()
    items = [{"kind": "perplexity", "prompt": "some text"}]
    with pytest.warns(NobodyServes, match="no worker runs worker.tasks.score for 'fake'"):
        site.client.submit({"model": "fake", "items": items})


def test_a_worker_starts_before_its_upstream(site: Site, server: FakeServer, start: Start) -> None:
    server.stop()
    worker = start()
    worker.says(f"waiting: the upstream {server.url} does not answer: ConnectError")
    job = site.submit()
    server.start()
    assert job.result(timeout=PATIENCE).text == text_of("hello")
    assert f"loaded fake: there of {server.url}, context 4096" in worker.output
    assert worker.output.count("waiting: ") == 1


def test_a_server_that_still_loads_is_waited_for(
    site: Site, server: FakeServer, start: Start
) -> None:
    server.list_answer = lambda exchange: exchange.respond(
        503, {"error": {"message": "Loading model"}}
    )
    worker = start()
    worker.says(f"waiting: the upstream {server.url} answers 503: Loading model")
    server.list_answer = None
    worker.says(" serves fake")


def test_the_key_goes_to_the_upstream_and_nowhere_else(
    site: Site, server: FakeServer, start: Start
) -> None:
    server.key = "Bearer sk-very-secret"
    worker = start(**{KEY: "sk-very-secret"})
    job = site.submit(run="r")
    assert job.result(timeout=PATIENCE).text == text_of("hello")
    (status,) = read_workers(site.redis)
    server.key = "Bearer another"
    worker.process.send_signal(signal.SIGTERM)
    worker.process.wait(PATIENCE)
    refused = start(**{KEY: "sk-very-secret"})
    assert refused.process.wait(PATIENCE) != 0
    refused._reader.join(PATIENCE)
    assert "answers 401: wrong key Bearer ***; is CHATJOBS_UPSTREAM_API_KEY right?" in (
        refused.output
    )
    shown = f"{worker.output} {refused.output} {status} {site.rows('r')}"
    assert "very-secret" not in shown
    assert server.url in status["device"]


def test_a_login_in_the_url_is_sent_and_not_shown(
    site: Site, server: FakeServer, start: Start
) -> None:
    server.key = "Basic dXNlcjpwYXNzd29yZA=="
    worker = start(url=server.url.replace("//", "//user:password@"))
    job = site.submit(run="r")
    assert job.result(timeout=PATIENCE).text == text_of("hello")
    (status,) = read_workers(site.redis)
    assert worker.end(signal.SIGTERM) == 0
    shown = f"{worker.output} {status} {site.rows('r')}"
    assert "password" not in shown
    assert status["device"] == server.url


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--model", "other"], "does not serve 'other'; it serves: there (--model QUEUE=NAME"),
        (["--model", "=there"], "'=there' is not QUEUE=NAME"),
        (["--model", "there", "--max-batch", "4", "--interactive-slots", "4"], "must be 0 to 3"),
        (["--model", "there", "--device", "cpu"], "--device has no effect with --upstream"),
        (["--model", "there", "--devices", "cpu"], "--devices has no effect"),
        (["--model", "there", "--memory", "50%"], "--memory has no effect"),
        (["--model", "there", "--host-memory", "1GiB"], "--host-memory has no effect"),
        (["--model", "there", "--draft", "ngram"], "--draft has no effect"),
        (["--model", "there", "--dtype", "bf16"], "--dtype has no effect"),
        (["--model", "there", "--context", "8"], "--context has no effect"),
        (["--model", "there", "--no-preempt"], "--preempt has no effect"),
        ([], "Missing option '-m' / '--model'"),
    ],
)
def test_what_makes_no_sense_is_refused_at_the_start(
    redis_url: str, server: FakeServer, tmp_path: Path, words: list[str], text: str
) -> None:
    command = ["work", "--upstream", server.url, "--redis", redis_url, "--burst", *words]
    done = CliRunner().invoke(build(), [*command, "--results", str(tmp_path)])
    assert done.exit_code != 0
    assert text in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("content", [b"<html><title>Welcome</title></html>", b'{"models": []}'])
def test_a_url_of_something_else_is_refused_at_the_start(
    redis_url: str, server: FakeServer, tmp_path: Path, content: bytes
) -> None:
    server.list_answer = lambda exchange: exchange.respond(200, content, content_type="text/html")
    command = ["work", "--upstream", server.url, "--model", "a", "--redis", redis_url]
    done = CliRunner().invoke(build(), [*command, "--results", str(tmp_path)])
    assert done.exit_code != 0
    assert f"{server.url}/models is no list of models" in " ".join(done.stderr.split())


def test_a_worker_of_an_upstream_imports_nothing_of_a_worker_with_models(
    site: Site, server: FakeServer
) -> None:
    code = (
        "import sys\n"
        f"for name in {UNNEEDED!r}: sys.modules[name] = None\n"
        "from jobs.cli import main\n"
        "main()"
    )
    job = site.submit()
    words = ["work", "--upstream", server.url, "--model", "fake=there", "--burst"]
    places = ["--redis", site.url, "--results", str(site.folder)]
    subprocess.run([sys.executable, "-c", code, *words, *places], check=True)
    assert site.row(job)["text"] == text_of("hello")


def test_without_its_package_the_command_to_install_it_is_named(
    server: FakeServer, redis_url: str
) -> None:
    code = (
        "import sys\n"
        "from importlib import util\n"
        "find = util.find_spec\n"
        "util.find_spec = lambda name, *more: None if name == 'httpx2' else find(name, *more)\n"
        "from jobs.cli import main\n"
        "main()"
    )
    words = ["work", "--upstream", server.url, "--model", "there", "--redis", redis_url]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.returncode != 0
    assert "--upstream needs httpx2: pip install" in done.stderr
