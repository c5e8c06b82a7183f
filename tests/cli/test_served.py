"""The commands against a real worker."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from jobs import Client
from jobs.embedded import EmbeddedRedis
from jobs.install import command_for
from jobs.operations import CHAT
from jobs.store.worker_status import read_workers
from tests.cli.conftest import COMMAND, Run, Show, Spawn
from tests.waiting import PATIENCE, wait_until

QUESTION = "What is 17 + 25?"
GREEDY = ("-o", "temperature=0")


class Served(NamedTuple):
    url: str
    results: Path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A Redis and a worker that serves the demo model."""
    results = tmp_path_factory.mktemp("results")
    with EmbeddedRedis() as redis:
        words = ("work", "--model", "demo", "--redis", redis.url, "--results", str(results))
        worker = subprocess.Popen([COMMAND, *words])
        with Client(redis.url) as client:
            while not read_workers(client.redis):
                assert worker.poll() is None, "the worker did not start"
                time.sleep(0.1)
        yield Served(redis.url, results)
        worker.terminate()
        assert worker.wait(timeout=PATIENCE) == 0


def test_piped_stdout_contains_only_the_answer(spawn: Spawn, served: Served) -> None:
    process = spawn("chat", "-m", "demo", *GREEDY, "--verbose", "--redis", served.url, QUESTION)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (0, "42\n")
    assert "tokens/s" in err
    assert "17+25" in err  # the reasoning


def test_quiet_leaves_stderr_empty(spawn: Spawn, served: Served) -> None:
    process = spawn("chat", "-m", "demo", *GREEDY, "-q", "--redis", served.url, QUESTION)
    assert process.communicate(timeout=PATIENCE) == ("42\n", "")


def test_an_answer_cut_at_its_limit_gets_a_hint(spawn: Spawn, served: Served) -> None:
    words = ("chat", "-m", "demo", "-o", "max_tokens=2", "--redis", served.url, QUESTION)
    hint = "the answer was cut at its token limit"
    assert hint in spawn(*words).communicate(timeout=PATIENCE)[1]
    assert hint not in spawn(*words, "-q").communicate(timeout=PATIENCE)[1]


def test_a_closed_stdout_exits_with_141(served: Served) -> None:
    words = f"{COMMAND} chat -q -m demo 'Count to 20.' --redis {served.url} --json"
    piped = subprocess.run(
        ["bash", "-c", f"{words} | head -c1 >/dev/null; echo ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (piped.stdout, piped.stderr) == ("141\n", "")
    closed = subprocess.run(
        ["bash", "-c", f"{words} >&-"], capture_output=True, text=True, timeout=PATIENCE
    )
    assert closed.returncode == 0, closed.stderr


def test_the_question_is_read_from_stdin(run: Run, served: Served) -> None:
    result = run("chat", "-m", "demo", *GREEDY, "--redis", served.url, "-", input=QUESTION)
    assert result.stdout == "42\n"


def test_json_prints_the_chunks_and_then_the_completion(run: Run, served: Served) -> None:
    result = run("chat", "-m", "demo", *GREEDY, "--json", "--redis", served.url, QUESTION)
    *chunks, completion = [json.loads(line) for line in result.stdout.splitlines()]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert completion["object"] == "chat.completion"
    assert completion["choices"][0]["message"]["content"] == "42"
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("content", "") for delta in deltas) == "42"


@pytest.mark.parametrize("quiet", [(), ("-q",)])
def test_each_of_several_choices_has_a_line_before_it_in_a_pipe(
    run: Run, served: Served, quiet: tuple[str, ...]
) -> None:
    words = ("chat", "-m", "demo", *GREEDY, "-o", "n=2", *quiet, "--redis", served.url, QUESTION)
    assert run(*words).stdout == "choice 1 of 2:\n42\n\nchoice 2 of 2:\n42\n"


def test_a_failed_job_exits_with_1_and_its_error(run: Run, served: Served) -> None:
    result = run("chat", "-m", "demo", "--redis", served.url, "again and " * 2000)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "context_length_exceeded" in result.stderr


def test_submitted_jobs_can_be_followed_by_id(run: Run, served: Served) -> None:
    rows = [{"prompt": QUESTION, "temperature": 0, "custom_id": f"q{i}"} for i in range(3)]
    lines = "\n".join(json.dumps(row) for row in rows)
    result = run("submit", "-", "-m", "demo", "--redis", served.url, input=lines)
    assert result.stderr == "3 jobs enqueued\n"
    for job in result.stdout.split():
        assert run("follow", job, "-q", "--redis", served.url).stdout == "42\n"
    ended = run("cancel", job, "--redis", served.url)
    assert (ended.exit_code, ended.stderr) == (0, f"{job}: already finished\n")


def test_a_run_from_a_file_is_written_to_parquet(run: Run, served: Served) -> None:
    lines = "\n".join(
        json.dumps({"prompt": f"{a}+{a}", "temperature": 0, "target": str(2 * a), "task": "sums"})
        for a in range(20)
    )
    words = ("submit", "-", "-m", "demo", "--run", "sums", "--json", "--redis", served.url)
    jobs = [json.loads(line) for line in run(*words, input=lines).stdout.splitlines()]
    assert [job["line"] for job in jobs] == list(range(1, 21))
    rows: list[dict[str, Any]] = []

    def all_are_written() -> bool:
        result = run("results", "sums", "--json", "--results", str(served.results))
        rows[:] = [json.loads(line) for line in result.stdout.splitlines()]
        return len(rows) >= 20

    wait_until(all_are_written)
    assert sorted(row["row_index"] for row in rows) == list(range(20))
    assert {row["job_id"] for row in rows} == {job["id"] for job in jobs}
    assert all(json.loads(row["metadata"]) == {"task": "sums"} for row in rows)


def failed_jobs(run: Run, served: Served) -> int:
    status = json.loads(run("status", "--json", "--redis", served.url).stdout)
    return sum(one["failed"] for one in status["queues"])


def test_status_lists_workers_and_queues(run: Run, served: Served) -> None:
    run("chat", "-m", "demo", *GREEDY, "--redis", served.url, "2+2")
    failed = failed_jobs(run, served) + 1
    run("chat", "-m", "demo", "--redis", served.url, "again and " * 2000)
    waiting = {"queued": 0, "deferred": 0, "scheduled": 0, "running": 0}
    queue = {"name": "chat:demo", "model": "demo", "func": CHAT.func}
    facts = {**queue, **waiting, "failed": failed, "oldest_s": 0.0, "workers": 1}

    def shown() -> tuple[list[str], Any]:
        status = json.loads(run("status", "--json", "--redis", served.url).stdout)
        models = [name for worker in status["workers"] for name in worker["models"]]
        return models, next(one for one in status["queues"] if one["name"] == "chat:demo")

    wait_until(lambda: shown() == (["demo"], facts))
    assert "chat:demo" in run("status", "--redis", served.url).stdout


def test_host_option_selects_workers_and_fails_without_one(run: Run, served: Served) -> None:
    words = ("status", "--host", socket.gethostname(), "--json", "--redis", served.url)
    wait_until(lambda: run(*words).exit_code == 0)
    there = run("status", "--host", "elsewhere", "--json", "--redis", served.url)
    assert there.exit_code == 1


def test_work_without_torch_exits_with_3_and_a_hint() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "sys.argv = ['chatjobs', 'work', '--model', 'demo']\n"
        "from jobs.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 3
    assert f"needs torch: {command_for('worker')} (on Linux a download of about 3 GB" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--chat-template", "/not/there"), "'/not/there' does not exist"),
        (("--chat-template", __file__, "--model", "other"), "--chat-template is for one model"),
        (("--tool-parser", "mistral"), "'hermes', 'llama3_json', 'pythonic', 'qwen3_coder'"),
    ],
)
def test_wrong_chat_options_of_work_exit_with_2(
    run: Run, words: tuple[str, ...], message: str
) -> None:
    result = run("work", "--model", "demo", *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "demo", "--device", "cuda:99"), "cuda:99"),
        (("--model", "./not/there"), "not/there"),
    ],
)
def test_work_with_a_missing_device_or_model_exits_with_3(
    show: Show, served: Served, words: tuple[str, ...], message: str
) -> None:
    shown = show("work", *words, "--redis", served.url, "--results", str(served.results))
    assert (shown.code, shown.out) == (3, "")
    assert message in shown.err
    assert "Traceback" not in shown.err
